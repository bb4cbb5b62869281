"""What a run leaves behind: checkpoints, its status for others to read, its measures."""
