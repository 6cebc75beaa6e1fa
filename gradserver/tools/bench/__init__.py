"""`gradserver bench`: measures, beside gloo and the machine's own limits. It begins in `.command`."""
