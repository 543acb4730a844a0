"""Engines that sample on a server: one client, and a `ServerSpec` per kind of server."""
