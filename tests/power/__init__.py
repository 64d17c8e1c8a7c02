"""Power losses: records what a daemon writes and syncs, and starts daemons on states in which a
power loss may leave the device."""
