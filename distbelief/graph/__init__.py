"""What is computed: regions of layers, and which region needs which."""
