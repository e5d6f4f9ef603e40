"""Transfers of saved storages between memory and a store."""
