"""What a weight update costs on real SGLang engines: pause, tokens lost, recovery, and the same by the common way."""
