"""What several test rooms share; the tiny model and the launcher of forked ranks are in tools/."""
