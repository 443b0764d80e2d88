"""The page at `/`: what this is, where to go and how to scrape it, without any resource from elsewhere."""

from __future__ import annotations

from html import escape

_LINKS = (
    ("/metrics", "Metrics", "what Prometheus scrapes"),
    ("/sd", "Discovery", "ranks that serve their own endpoint"),
    ("/-/healthy", "Healthy", "the process serves"),
    ("/-/ready", "Ready", "the first collection is done"),
)

_STYLE = """
:root { color-scheme: light dark; --ink: #1c2430; --soft: #5b6878; --line: #d9dfe7; --card: #fff; --page: #f4f6f9;
  --accent: #b5380b }
@media (prefers-color-scheme: dark) { :root { --ink: #e8edf3; --soft: #9aa7b6; --line: #2c3644; --card: #19212c;
  --page: #10161e; --accent: #ff8a5c } }
body { margin: 0; min-height: 100vh; display: grid; place-items: center; background: var(--page); color: var(--ink);
  font: 16px/1.5 system-ui, sans-serif }
main { width: min(34rem, calc(100vw - 2rem)); background: var(--card); border: 1px solid var(--line);
  border-radius: 12px; padding: 2rem; margin: 1rem 0; box-sizing: border-box }
h1 { margin: 0; font-size: 1.5rem } h2 { margin: 1.5rem 0 .5rem; font-size: 1rem }
p { margin: .25rem 0 1.5rem; color: var(--soft) } p:last-child { margin: .75rem 0 0 }
a { display: flex; justify-content: space-between; gap: 1rem; padding: .75rem 0; border-top: 1px solid var(--line);
  color: var(--accent); text-decoration: none; font-weight: 600 } a:hover { text-decoration: underline }
nav { border-bottom: 1px solid var(--line) } span { color: var(--soft); font-weight: 400; text-align: right }
pre { margin: 0; padding: .75rem 1rem; background: var(--page); border-radius: 8px; overflow-x: auto }
pre, code { font: 13px/1.5 ui-monospace, monospace } code { white-space: nowrap }
"""


def page(version: str, node: str, address: str, *, secure: bool) -> str:
    """The whole HTML document. `address`: HOST:PORT as the visitor knows it; `secure`: it is served over TLS."""
    links = "".join(
        f'<a href="{path}">{name}<span>{text}</span></a>' for path, name, text in _LINKS
    )
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>torchmem exporter on {escape(node)}</title><style>{_STYLE}</style></head><body><main>"
        f"<h1>torchmem exporter</h1><p>Version {escape(version)} on {escape(node)}: "
        f"PyTorch GPU memory of every rank, beside what NVML says.</p><nav>{links}</nav>"
        f"<h2>In prometheus.yml</h2><pre>{escape(_scrape_config(address, secure=secure))}</pre>"
        "<p>Settings: <code>torchmem exporter --print-config</code>. "
        "TLS and passwords: <code>--web.config.file</code>.</p></main></body></html>"
    )


def _scrape_config(address: str, *, secure: bool) -> str:
    scheme = "    scheme: https\n" if secure else ""
    return f"scrape_configs:\n  - job_name: torchmem\n{scheme}    static_configs:\n      - targets: ['{address}']"
