"""What everything stands on: errors, settings, places, files, worker processes, and the machine."""
