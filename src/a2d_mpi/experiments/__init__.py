"""Programs: what they measure and check, the files that they leave, their command line."""
