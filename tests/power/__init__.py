"""Power losses: what a daemon wrote and synced is recorded, and every state in which a device may
be left is started on."""
