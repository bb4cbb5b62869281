"""From gradients to new parameters: one flat buffer each."""
