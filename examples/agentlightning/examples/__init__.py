"""Examples: each folder is an agent as its framework's documentation would write it, with tasks and a reward."""
