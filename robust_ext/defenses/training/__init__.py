"""What published defenses train before they are used: small networks and subspaces, and their files."""
