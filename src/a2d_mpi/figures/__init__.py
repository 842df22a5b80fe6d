"""Pictures: everything that imports matplotlib."""
