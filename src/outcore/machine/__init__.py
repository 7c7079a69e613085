"""Machines: devices, links and clusters, probed here or known from a catalogue."""

from outcore.machine.catalogue import find, names
from outcore.machine.device import ELEMENT_BYTES, PRECISIONS, Device, precision_of
from outcore.machine.known import known, rated
from outcore.machine.link import HostLink, Link
from outcore.machine.machine import Machine
from outcore.machine.probe import cache_directory, probe, remembered
from outcore.machine.show import catalogue_table, machine_table
from outcore.machine.spec import parse
from outcore.machine.units import format_bytes, format_rate, format_time

__all__ = [
    "ELEMENT_BYTES",
    "PRECISIONS",
    "Device",
    "HostLink",
    "Link",
    "Machine",
    "cache_directory",
    "catalogue_table",
    "find",
    "format_bytes",
    "format_rate",
    "format_time",
    "known",
    "machine_table",
    "names",
    "parse",
    "precision_of",
    "probe",
    "rated",
    "remembered",
]
