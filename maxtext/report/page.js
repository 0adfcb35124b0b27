// Shows the values under the pointer in a chart's legend. Everything else on the page works without this.
for (const figure of document.querySelectorAll("figure")) {
  const { x: [low, high], curves } = JSON.parse(figure.querySelector("script").textContent);
  const plot = figure.querySelector(".plot"), cursor = figure.querySelector(".cursor");
  const shown = [...figure.querySelectorAll(".legend b")], atRest = shown.map((b) => b.textContent);
  const title = figure.querySelector("h2"), restTitle = title.innerHTML;
  const nearest = (xs, x) => {
    let a = 0, b = xs.length - 1;
    while (b - a > 1) { const m = (a + b) >> 1; if (xs[m] < x) a = m; else b = m; }
    return Math.abs(xs[a] - x) <= Math.abs(xs[b] - x) ? a : b;
  };
  plot.addEventListener("pointermove", (event) => {
    const box = plot.getBoundingClientRect();
    const at = Math.min(Math.max((event.clientX - box.left) / box.width, 0), 1);
    const x = low + at * (high - low);
    curves.forEach(({ x: xs, y: ys }, i) => { shown[i].textContent = ys[nearest(xs, x)].toLocaleString("en", { maximumSignificantDigits: 4 }); });
    const longest = curves.reduce((a, b) => (b.x.length > a.x.length ? b : a));
    const step = longest.x[nearest(longest.x, x)];
    title.innerHTML = restTitle + ` <small>at ${step.toLocaleString("en")}</small>`;
    cursor.style.display = "block";
    cursor.style.left = `${(step - low) / (high - low) * 100}%`;
  });
  plot.addEventListener("pointerleave", () => {
    shown.forEach((b, i) => { b.textContent = atRest[i]; });
    title.innerHTML = restTitle;
    cursor.style.display = "none";
  });
}
