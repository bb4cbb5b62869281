"""Trains a DFlash drafter against a frozen target; knows nothing of who deploys it."""
