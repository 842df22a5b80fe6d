"""The methods, and the plan that users hold.  `attention2d` is the file to read first."""
