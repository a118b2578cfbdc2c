"""Many ranks: who writes what."""
