"""Pages of reports: tables for the terminal, Markdown and HTML, SVG charts, and self-contained HTML
pages.
"""
