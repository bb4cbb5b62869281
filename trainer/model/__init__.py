"""The frozen target, the drafter, its blocks and its loss."""
