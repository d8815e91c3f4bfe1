"""The loss over classes, given its logits or the product that makes them."""
