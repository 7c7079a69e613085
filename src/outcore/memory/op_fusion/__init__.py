"""Several operations of a network as one, where that is faster; found by pattern, chosen by measurement."""
