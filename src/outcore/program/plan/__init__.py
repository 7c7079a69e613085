"""The plan as a document: what it may say, how its stages name blocks, an order of instructions written by hand."""
