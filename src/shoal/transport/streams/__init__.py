"""The transport contract over any network of byte streams whose other end has proven its key."""
