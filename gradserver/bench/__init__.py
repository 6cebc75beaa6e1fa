"""`gradserver bench`: measures, beside gloo and the machine's own limits. `gradserver.bench.command` is the way in."""
