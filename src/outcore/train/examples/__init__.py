"""What there is to learn from, and the order in which it comes."""
