"""What a relay client keeps to itself, since too few of its examples stand behind it."""
