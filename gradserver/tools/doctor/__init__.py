"""`gradserver doctor`: what this machine, its devices and a coordinator can do, and what to change."""
