// Draws every figure of the page, in the colours of the page: light or dark as the reader's system is, light on paper.
(() => {
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  const plots = [...document.querySelectorAll(".plot")];
  const paper = 680; // pixels between the margins of a printed page
  let printing = false;
  const ink = () => (dark.matches && !printing ? "#c9d1d9" : "#2b3440");

  for (const plot of plots) {
    const { data, layout } = JSON.parse(document.getElementById(`${plot.id}-data`).textContent);
    plot.wanted = layout.width || null; // maps are square; what has no width of its own takes the page's
    plot.tall = layout.height;
    const config = { ...window.REPORT_CONFIG, responsive: !plot.wanted };
    config.toImageButtonOptions = { ...config.toImageButtonOptions, filename: plot.id };
    Plotly.newPlot(plot, data, { ...layout, autosize: !plot.wanted, font: { ...layout.font, color: ink() } }, config);
  }
  const size = ({ wanted, tall }) => {
    if (!printing) return { width: wanted, height: tall, autosize: !wanted };
    return wanted && wanted <= paper ? {} : { width: paper, height: wanted ? (tall * paper) / wanted : tall };
  };
  const restyle = () => plots.forEach((plot) => Plotly.relayout(plot, { "font.color": ink(), ...size(plot) }));
  dark.addEventListener("change", restyle);
  window.addEventListener("beforeprint", () => { printing = true; restyle(); });
  window.addEventListener("afterprint", () => { printing = false; restyle(); });
  document.documentElement.dataset.drawn = plots.length;
})();
