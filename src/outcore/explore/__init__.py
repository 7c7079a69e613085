"""The page on which a network, its costs and its plans are looked at; and the same facts in an editor."""
