"""Dpplee3's modes and frequencies on digits, beside a reference written from its equations."""
