"""The time from an empty folder to a verified run and its report."""
