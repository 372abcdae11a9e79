"""The neurons of several networks brought into one order."""
