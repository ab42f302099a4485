"""The membership protocol at work: the network thread, messages between islands that come and go,
lost islands, newcomers."""
