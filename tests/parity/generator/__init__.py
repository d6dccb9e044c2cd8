"""Random valid plans x random small models against one device: what no table written by hand would
think of.
"""
