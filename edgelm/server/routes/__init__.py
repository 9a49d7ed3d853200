"""The routes that the front answers itself."""
