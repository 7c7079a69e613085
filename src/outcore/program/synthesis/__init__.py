"""Making schedules: a list scheduler, and the search for the best order."""
