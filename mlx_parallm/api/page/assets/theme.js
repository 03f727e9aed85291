// Runs before the page is drawn, so that a chosen theme does not appear late. Not a module.
(() => {
  try {
    const theme = localStorage.getItem("mlx-parallm-theme");
    if (theme === "light" || theme === "dark") document.documentElement.dataset.theme = theme;
  } catch {
    // Storage is turned off: the system's theme it is.
  }
})();
