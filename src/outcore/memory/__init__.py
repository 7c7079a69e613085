"""Executes policies for what backward needs: kept, recomputed, offloaded, encoded."""
