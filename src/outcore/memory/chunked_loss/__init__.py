"""The last layer and its loss in chunks of rows: lazy tensors in the place of the logits, and their gradients."""
