"""The front's engine processes: started, given memory, watched and ended."""
