// Apply the chosen theme before anything is drawn. Without a choice, the browser's preference counts.
try {
  const theme = localStorage.getItem("torchmem-theme");
  if (theme === "dark" || theme === "light") document.documentElement.dataset.theme = theme;
} catch {
  // Storage is switched off: the browser's preference counts.
}
