"""The commands of `maecho`, one function each. A module holds the commands of one job."""
