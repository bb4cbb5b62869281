"""What a person types, turned into work on hosts. Imports neither torch nor the trainer."""
