// Draws the curves and the timeline of the page from the numbers in it; every text is set as text, never as HTML.
"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const tip = document.getElementById("tip");
  const hues = 6;

  function svg(name, attributes, parent, text) {
    const node = document.createElementNS("http://www.w3.org/2000/svg", name);
    for (const key in attributes) node.setAttribute(key, attributes[key]);
    if (text !== undefined) node.textContent = text;
    if (parent) parent.append(node);
    return node;
  }

  function html(name, parent, text, kind) {
    const node = document.createElement(name);
    if (text !== undefined) node.textContent = text;
    if (kind) node.className = kind;
    if (parent) parent.append(node);
    return node;
  }

  // Numbers as people read them.
  function digits(value) {
    const size = Math.abs(value);
    if (size === 0) return "0";
    if (size >= 1e6) return value.toExponential(2);
    if (size >= 1000) return Math.round(value).toLocaleString("en");
    if (size < 1e-3) return value.toExponential(2).replace(/\.?0+e/, "e");
    return String(Number(value.toPrecision(4)));
  }

  function bytes(value) {
    const units = ["bytes", "kB", "MB", "GB", "TB"];
    let unit = 0;
    while (value >= 999.5 && unit < units.length - 1) { value /= 1000; unit += 1; }
    return Number(value.toPrecision(3)) + " " + units[unit];
  }

  function time(seconds) {
    if (seconds < 60) return Number(seconds.toPrecision(2)) + " s";
    if (seconds < 3600) return Math.floor(seconds / 60) + " min " + Math.round(seconds % 60) + " s";
    return Math.floor(seconds / 3600) + " h " + Math.round(seconds % 3600 / 60) + " min";
  }

  function shown(value, unit) {
    if (unit === "bytes") return bytes(value);
    if (unit === "share") return digits(100 * value) + " %";
    if (unit === "seconds") return digits(value) + " s";
    return digits(value);
  }

  // Round places for an axis from low to high.
  function ticks(low, high, most) {
    const rough = (high - low) / most || 1;
    const power = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 5, 10].map((n) => n * power).find((size) => size >= rough * 0.999);
    const found = [];
    for (let n = Math.ceil(low / step - 1e-9); n * step <= high + step * 1e-9; n += 1) found.push(n * step || 0);
    return found;
  }

  function decades(low, high) {
    const found = [];
    for (let power = Math.floor(Math.log10(low)); power <= Math.ceil(Math.log10(high)); power += 1) {
      for (const n of [1, 2, 5]) {
        const value = n * 10 ** power;
        if (value >= low * 0.999 && value <= high * 1.001) found.push(value);
      }
    }
    return found.length > 7 ? found.filter((value) => Math.abs(Math.log10(value) % 1) < 1e-9) : found;
  }

  function colour(series) {
    if (series.kind === "lost") return "var(--lost)";
    if (series.kind === "dots" && !several) return "var(--validation)";
    return "var(--run" + series.run % hues + ")";
  }

  function nearest(xs, x) {
    let low = 0;
    let high = xs.length - 1;
    while (high - low > 1) {
      const middle = (low + high) >> 1;
      if (xs[middle] < x) low = middle; else high = middle;
    }
    return Math.abs(xs[low] - x) <= Math.abs(xs[high] - x) ? low : high;
  }

  function showTip(event, title, lines) {
    tip.replaceChildren();
    html("b", tip, title);
    for (const [text, hue] of lines) {
      const line = html("div", tip);
      if (hue) html("i", line).style.background = hue;
      line.append(text);
    }
    tip.hidden = false;
    const { width, height } = tip.getBoundingClientRect();
    const left = event.clientX + 14 + width > innerWidth ? event.clientX - width - 14 : event.clientX + 14;
    tip.style.left = Math.max(4, Math.min(left, innerWidth - width - 4)) + "px";
    tip.style.top = Math.max(4, Math.min(event.clientY + 14, innerHeight - height - 4)) + "px";
  }

  const several = new Set(data.charts.flatMap((chart) => chart.series.map((series) => series.run))).size > 1;
  const all = data.charts.flatMap((chart) => chart.series.flatMap((series) => series.x));
  // Not by spreading: an argument list has less room than a long run has steps.
  const range = all.reduce(([low, high], x) => [Math.min(low, x), Math.max(high, x)], [Infinity, -Infinity]);

  function draw(chart, box) {
    box.querySelector("svg")?.remove();
    const wide = box.classList.contains("wide");
    const width = Math.max(240, box.clientWidth);
    const height = wide ? Math.min(360, Math.max(250, width * 0.36)) : 190;
    const [left, right, top, bottom] = [54, 10, 16, 24];
    const root = svg("svg", { viewBox: `0 0 ${width} ${height}`, height, role: "img" }, box);
    root.setAttribute("aria-label", chart.title + " by step");
    const log = chart.isLog && chart.series.some((series) => series.y.some((y) => y > 0));
    const values = chart.series.flatMap((series) => series.y).filter((y) => !log || y > 0);
    let [low, high] = values.reduce(([a, b], y) => [Math.min(a, y), Math.max(b, y)], [Infinity, -Infinity]);
    if (!log && low > 0 && low < 0.5 * high) low = 0;
    if (low !== high && !log) {
      const room = (high - low) * 0.05;
      high += room;
      if (low !== 0) low -= room;
    }
    if (low === high) { low -= Math.abs(low) * 0.1 || 1; high += Math.abs(high) * 0.1 || 1; }
    const [x0, x1] = range[0] === range[1] ? [range[0] - 1, range[1] + 1] : range;
    const scale = (y) => log ? (Math.log(y) - Math.log(low)) / (Math.log(high) - Math.log(low)) : (y - low) / (high - low);
    const X = (x) => left + (x - x0) / (x1 - x0) * (width - left - right);
    const Y = (y) => height - bottom - Math.max(0, Math.min(1, scale(Math.max(y, log ? low : y)))) * (height - top - bottom);
    for (const tick of log ? decades(low, high) : ticks(low, high, wide ? 6 : 4)) {
      svg("line", { class: "grid", x1: left, x2: width - right, y1: Y(tick), y2: Y(tick) }, root);
      svg("text", { x: left - 7, y: Y(tick) + 4, "text-anchor": "end" }, root, shown(tick, chart.unit));
    }
    for (const tick of ticks(x0, x1, Math.max(2, Math.floor(width / 110)))) {
      if (Number.isInteger(tick)) {
        const anchor = X(tick) > width - 30 ? "end" : "middle";
        const x = anchor === "end" ? Math.min(width, X(tick) + 12) : X(tick);
        svg("text", { x, y: height - 6, "text-anchor": anchor }, root, tick.toLocaleString("en"));
      }
    }
    svg("line", { class: "axis", x1: left, x2: width - right, y1: height - bottom, y2: height - bottom }, root);
    // Of very many restarts only the place is marked, so that the curve can be seen.
    const crowded = chart.marks.length > width / 25;
    let labelled = -Infinity;
    for (const mark of chart.marks) {
      const line = svg("line", { class: "mark", x1: X(mark.x), x2: X(mark.x), y1: crowded ? height - bottom - 7 : top - 4, y2: height - bottom }, root);
      svg("title", {}, line, mark.text);
      if (several) line.style.stroke = `var(--run${mark.run % hues})`;
      if (wide && !crowded && X(mark.x) - labelled > 46) {
        svg("text", { x: X(mark.x) + 4, y: top + 4 }, root, "start " + mark.label);
        labelled = X(mark.x);
      }
    }
    // What was lost is drawn over the curve: where a resume is exact, both can be seen.
    const order = { faint: 0, line: 1, dots: 2, lost: 3 };
    for (const series of [...chart.series].sort((a, b) => order[a.kind] - order[b.kind])) {
      const d = series.x.map((x, i) => (i ? "L" : "M") + X(x).toFixed(1) + " " + Y(series.y[i]).toFixed(1)).join("");
      const path = svg("path", { class: "curve " + series.kind, d, fill: "none", "stroke-linejoin": "round" }, root);
      path.style.stroke = colour(series);
      path.style.strokeWidth = series.kind === "faint" || (series.x.length > 500 && !wide) ? 1 : 2;
      path.style.opacity = series.kind === "faint" ? 0.3 : series.kind === "dots" && several ? 0.55 : 1;
      if (series.kind === "lost") path.style.strokeDasharray = "4 4";
      const radius = series.kind === "dots" ? 3.2 : 2.2;
      if (series.x.length === 1 || (series.kind !== "faint" && series.kind !== "line" && series.x.length <= 60)) {
        series.x.forEach((x, i) => {
          svg("circle", { cx: X(x), cy: Y(series.y[i]), r: radius }, root).style.fill = colour(series);
        });
      }
    }
    const cross = svg("line", { class: "cross", y1: top, y2: height - bottom, visibility: "hidden" }, root);
    root.addEventListener("pointermove", (event) => {
      const bounds = root.getBoundingClientRect();
      const x = x0 + ((event.clientX - bounds.left) / bounds.width * width - left) / (width - left - right) * (x1 - x0);
      const near = chart.series.map((series) => ({ series, i: nearest(series.x, x) }));
      const at = near.map(({ series, i }) => series.x[i]).reduce((a, b) => Math.abs(a - x) <= Math.abs(b - x) ? a : b);
      const close = near.filter(({ series, i }) => Math.abs(series.x[i] - at) <= (x1 - x0) / 150);
      cross.setAttribute("x1", X(at));
      cross.setAttribute("x2", X(at));
      cross.setAttribute("visibility", "visible");
      showTip(event, "step " + at.toLocaleString("en"), close.map(({ series, i }) => [
        shown(series.y[i], chart.unit) + "  " + series.name, colour(series)]));
    });
    root.addEventListener("pointerleave", () => { cross.setAttribute("visibility", "hidden"); tip.hidden = true; });
  }

  // A few values far above the others would press all of those flat.
  function hasOutliers(chart) {
    const values = chart.series.flatMap((series) => series.y).sort((a, b) => a - b);
    return values[0] > 0 && values[values.length - 1] > 50 * values[values.length >> 1];
  }

  function addChart(chart, parent) {
    const box = html("div", parent, undefined, chart.id === "loss" ? "chart wide" : "chart");
    box.id = "chart-" + chart.id;
    const head = html("header", box);
    html("h3", head, chart.title);
    const legend = html("span", head, undefined, "legend");
    const named = new Map();
    for (const series of chart.series) {
      const name = series.kind === "lost" ? "lost, made again" : series.name;
      if (!named.has(name)) named.set(name, series);
    }
    if (chart.id === "loss") {
      for (const [name, series] of named) {
        const entry = html("span", legend);
        const line = html("i", entry, undefined, series.kind);
        line.style.borderTopColor = colour(series);
        entry.append(name);
      }
    }
    if (chart.log) {
      const button = html("button", head, "log");
      button.type = "button";
      button.title = "Logarithmic axis";
      chart.isLog = hasOutliers(chart);
      button.setAttribute("aria-pressed", String(chart.isLog));
      button.addEventListener("click", () => {
        chart.isLog = !chart.isLog;
        button.setAttribute("aria-pressed", String(chart.isLog));
        draw(chart, box);
      });
    }
    draw(chart, box);
    return () => draw(chart, box);
  }

  // One bar a start, on a common scale of time: its phases, and below them its saves.
  function drawTimeline(box) {
    const starts = data.timelines[Number(box.dataset.run)];
    box.replaceChildren();
    if (!starts.length) { html("p", box, "It has not been started.", "empty"); return; }
    const legend = html("p", box, undefined, "legend");
    for (const phase of new Set(starts.flatMap((start) => start.spans.map((span) => span.phase)))) {
      const entry = html("span", legend);
      html("i", entry).style.borderTopColor = `var(--${phase})`;
      entry.append(phase);
    }
    const entry = html("span", legend);
    html("i", entry).style.borderTopColor = "var(--saving)";
    entry.append("a save, behind the training");
    const width = Math.max(240, box.clientWidth);
    const longest = Math.max(1e-3, ...starts.map((start) => start.lasted));
    const X = (seconds) => seconds / longest * (width - 8) + 2;
    for (const start of starts) {
      const row = html("div", box, undefined, "row");
      const label = html("p", row);
      html("b", label, `${start.number} ${start.plan}`);
      html("span", label, `${start.began.replace("T", " ").replace("Z", " UTC")}, ${time(start.lasted)}, ${start.end}`, "muted");
      const root = svg("svg", { viewBox: `0 0 ${width} 30`, height: 30, role: "img" }, row);
      root.setAttribute("aria-label", `what start ${start.number} spent its time on`);
      svg("rect", { x: 2, y: 2, width: width - 6, height: 15, rx: 4, style: "fill: var(--soft)" }, root);
      for (const span of start.spans) {
        const bar = svg("rect", {
          x: X(span.from), y: 2, height: 15, rx: 1, width: Math.max(span.phase === "saving" ? 2 : 0.5, X(span.to) - X(span.from)),
        }, root);
        bar.style.fill = `var(--${span.phase}, var(--starting))`;
        hover(bar, span.phase, [[`${time(span.to - span.from)}` + (span.step === null ? "" : `, at step ${span.step}`)]]);
      }
      for (const save of start.saves) {
        const end = save.to ?? start.lasted;
        const bar = svg("rect", { x: X(save.from), y: 20, height: 6, rx: 2, width: Math.max(3, X(end) - X(save.from)) }, root);
        bar.style.fill = save.outcome === "committed" ? "var(--saving)" : "var(--bad)";
        const lines = [[`${save.outcome}` + (save.to === null ? "" : ` after ${time(save.to - save.from)}`)]];
        if (save.bytes) lines.push([bytes(save.bytes)]);
        if (save.stall !== null) lines.push([`training stood still for ${time(save.stall)}`]);
        hover(bar, `save of step ${save.step}`, lines);
      }
    }
  }

  function hover(node, title, lines) {
    node.addEventListener("pointermove", (event) => showTip(event, title, lines));
    node.addEventListener("pointerleave", () => { tip.hidden = true; });
  }

  const parent = document.getElementById("charts");
  const redraw = parent ? data.charts.filter((chart) => chart.series.length).map((chart) => addChart(chart, parent)) : [];
  for (const box of document.querySelectorAll(".timeline")) {
    drawTimeline(box);
    redraw.push(() => drawTimeline(box));
  }
  let width = innerWidth;
  addEventListener("resize", () => {
    if (innerWidth !== width) { width = innerWidth; redraw.forEach((again) => again()); }
  });
})();
