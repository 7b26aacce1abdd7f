"use strict";

(() => {
  const runs = JSON.parse(document.getElementById("data").textContent);
  const COLOURS = 6;
  const DASHES = ["", "6 3", "2 3", "9 3 2 3"];
  const AXES = { epoch: "epochs", step: "steps", seconds: "minutes" };
  const shownRuns = new Set(runs.keys());
  const redraws = [];
  let axis = "epoch";
  let logarithmic = false;

  // Making elements. Text goes in as text: names come from files.

  function html(tag, attributes = {}, ...children) {
    const made = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
    made.append(...children);
    return made;
  }

  function draw(tag, attributes = {}, ...children) {
    const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
    for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
    made.append(...children);
    return made;
  }

  function canvas(width, height, title) {
    const svg = draw("svg", { width, height, role: "img", "aria-label": title });
    svg.append(draw("title", {}, title));
    return svg;
  }

  function key(colour) {
    const made = html("i", { class: "key" });
    made.style.background = colour;
    return made;
  }

  // Plain runs are drawn in ink, the others in colours; dashes tell apart what has the same colour.
  function looks() {
    let plain = 0;
    let other = 0;
    return runs.map((run) => {
      const nth = run.plain ? plain++ : other++;
      const colour = run.plain ? "var(--ink)" : `var(--run-${nth % COLOURS})`;
      return { colour, dash: DASHES[(run.plain ? nth : Math.floor(nth / COLOURS)) % DASHES.length] };
    });
  }
  const look = looks();

  // Numbers as text.

  const significant = (value, digits) => String(Number(value.toPrecision(digits)));
  const whole = (value) => Math.round(value).toLocaleString("en");

  function size(value) {
    if (value >= 1e9) return `${(value / 1e9).toFixed(2)} GB`;
    if (value >= 1e6) return `${(value / 1e6).toFixed(1)} MB`;
    return value >= 1e3 ? `${(value / 1e3).toFixed(1)} kB` : `${Math.round(value)} B`;
  }

  function short(value) {
    const size = Math.abs(value);
    if (size >= 1e4) return `${significant(value / 1e3, 3)}k`;
    return size && size < 1e-3 ? value.toExponential(0) : significant(value, 3);
  }

  function shortened(name, letters) {
    return name.length > letters ? `${name.slice(0, Math.max(letters - 1, 1))}…` : name;
  }

  // The tooltip.

  const tip = html("div", { id: "tip", hidden: "" });
  document.body.append(tip);

  function tell(event, title, lines) {
    tip.replaceChildren(html("b", {}, title));
    for (const { colour, text } of lines) {
      const line = html("span");
      if (colour) line.append(key(colour));
      line.append(text);
      tip.append(line);
    }
    tip.hidden = false;
    const right = event.clientX + 16 + tip.offsetWidth > window.innerWidth;
    const left = right ? event.clientX - 16 - tip.offsetWidth : event.clientX + 16;
    const top = Math.min(event.clientY + 12, window.innerHeight - tip.offsetHeight - 4);
    tip.style.left = `${Math.max(4, left)}px`;
    tip.style.top = `${Math.max(4, top)}px`;
  }

  function onPoint(svg, show, leave) {
    const away = () => {
      tip.hidden = true;
      leave();
    };
    const at = (event) => {
      const box = svg.getBoundingClientRect();
      if (!show(event, event.clientX - box.left, event.clientY - box.top)) away();
    };
    svg.addEventListener("pointermove", at);
    svg.addEventListener("pointerdown", at);
    svg.addEventListener("pointerleave", away);
  }

  // Draws now, and again whenever the place has another width.
  function responsive(figure, paint) {
    const place = figure.querySelector(".place");
    let width = 0;
    const again = () => {
      width = place.clientWidth;
      if (width > 0) paint(place, width);
    };
    new ResizeObserver(() => {
      if (place.clientWidth !== width) requestAnimationFrame(again);
    }).observe(place);
    again();
    return again;
  }

  // Scales.

  function ticks(low, high, wanted, log) {
    if (log) {
      const found = [];
      for (let e = Math.floor(Math.log10(low)); e <= Math.ceil(Math.log10(high)); e++) {
        for (const factor of [1, 2, 5]) found.push(factor * 10 ** e);
      }
      const inside = found.filter((value) => value >= low * 0.999 && value <= high * 1.001);
      const powers = inside.filter((value) => Number.isInteger(Math.log10(value)));
      return powers.length > 3 ? powers : inside;
    }
    const rough = (high - low) / wanted || 1;
    const power = 10 ** Math.floor(Math.log10(rough));
    const step = power * [1, 2, 5, 10].find((factor) => factor * power >= rough * 0.999);
    const found = [];
    for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; i++) found.push(i * step);
    return found;
  }

  function scale(low, high, from, to, log) {
    if (low === high) {
      const room = Math.abs(low || 1) / 2;
      [low, high] = log ? [low / 2, high * 2] : [low - room, high + room];
    }
    const place = log ? Math.log : (value) => value;
    const made = (value) => from + ((place(value) - place(low)) / (place(high) - place(low))) * (to - from);
    made.low = low;
    made.high = high;
    return made;
  }

  // A chart of curves. Each is {name, colour, dash, thin, stepped, x: [...], y: [...]}; null in y is a gap.
  function lines(place, width, { title, curves, xName, yText, tipX, log = false, height = 230 }) {
    const fits = (y) => y !== null && (!log || y > 0);
    const points = curves.map((curve) =>
      curve.x.map((x, i) => [x, curve.y[i]]).filter(([x, y]) => x !== null && (y === null || fits(y))),
    );
    const known = points.flat().filter(([, y]) => y !== null);
    if (!known.length) {
      place.replaceChildren(html("p", {}, "Nothing to draw: no finite values."));
      return;
    }
    let [x0, x1, y0, y1] = [Infinity, -Infinity, Infinity, -Infinity];
    for (const [x, y] of known) {
      x0 = Math.min(x0, x);
      x1 = Math.max(x1, x);
      y0 = Math.min(y0, y);
      y1 = Math.max(y1, y);
    }
    const room = (y1 - y0) * 0.05;
    const range = log ? [y0 / 1.05, y1 * 1.05] : [y0 - room, y1 + room];
    const vertical = scale(...range, height - 34, 8, log);
    const yTicks = ticks(vertical.low, vertical.high, 5, log);
    const margin = 12 + 7 * Math.max(...yTicks.map((value) => yText(value).length));
    const horizontal = scale(x0 > 0 && x0 < x1 / 5 ? 0 : x0, x1, margin, width - 14);
    const svg = canvas(width, height, title);
    for (const value of yTicks) {
      const y = vertical(value);
      svg.append(draw("line", { class: "rule", x1: margin, x2: width - 14, y1: y, y2: y }));
      svg.append(draw("text", { x: margin - 8, y: y + 4, "text-anchor": "end" }, yText(value)));
    }
    for (const value of ticks(horizontal.low, horizontal.high, Math.max(2, width / 90))) {
      svg.append(draw("text", { x: horizontal(value), y: height - 16, "text-anchor": "middle" }, short(value)));
    }
    svg.append(draw("text", { x: width - 14, y: height - 1, "text-anchor": "end" }, xName));
    curves.forEach((curve, c) => {
      let path = "";
      let last = null;
      for (const [x, y] of points[c]) {
        if (y !== null) {
          const [px, py] = [horizontal(x).toFixed(1), vertical(y).toFixed(1)];
          path += last === null ? `M${px} ${py}` : curve.stepped ? `H${px}V${py}` : `L${px} ${py}`;
        }
        last = y;
      }
      const style = `stroke:${curve.colour};stroke-dasharray:${curve.dash || "none"}`;
      svg.append(draw("path", { class: curve.thin ? "curve thin" : "curve", d: path, style }));
      const few = points[c].filter(([, y]) => y !== null);
      if (few.length > 40) return;
      for (const [x, y] of few) {
        svg.append(draw("circle", { cx: horizontal(x), cy: vertical(y), r: 2.3, style: `fill:${curve.colour}` }));
      }
    });
    const cursor = draw("g");
    svg.append(cursor);
    onPoint(
      svg,
      (event, px) => {
        const away = ([x]) => Math.abs(horizontal(x) - px);
        const [nearest] = known.reduce((a, b) => (away(b) < away(a) ? b : a));
        const at = horizontal(nearest);
        cursor.replaceChildren(draw("line", { class: "cursor", x1: at, x2: at, y1: 8, y2: height - 34 }));
        const told = [];
        curves.forEach((curve, c) => {
          const mine = points[c].filter(([, y]) => y !== null);
          if (!mine.length) return;
          const [x, y] = mine.reduce((a, b) => (Math.abs(b[0] - nearest) < Math.abs(a[0] - nearest) ? b : a));
          if (Math.abs(horizontal(x) - at) > 12) return;
          cursor.append(draw("circle", { cx: horizontal(x), cy: vertical(y), r: 3.5, style: `fill:${curve.colour}` }));
          told.push({ colour: curve.colour, text: `${curve.name}: ${curve.text ? curve.text(y) : yText(y, true)}` });
        });
        tell(event, tipX(nearest), told);
        return true;
      },
      () => cursor.replaceChildren(),
    );
    place.replaceChildren(svg);
  }

  // Loss and accuracy of all runs.

  const CURVES = {
    loss: { from: "training", thin: true },
    accuracy: { from: "training", thin: true },
    validation_loss: { from: "validation" },
    validation_accuracy: { from: "validation" },
  };

  function curvesChart(figure) {
    const kind = figure.dataset.chart;
    const { from, thin } = CURVES[kind];
    const share = kind.endsWith("accuracy");
    const yText = (value, full) => {
      if (share) return `${significant(100 * value, full ? 4 : 3)} %`;
      return full ? significant(value, 4) : short(value);
    };
    const tipX = (x) => {
      if (axis === "step") return `step ${whole(x)}`;
      return axis === "epoch" ? `epoch ${significant(x, 4)}` : `${significant(x, 4)} min`;
    };
    redraws.push(
      responsive(figure, (place, width) => {
        const curves = [...shownRuns].sort((a, b) => a - b).map((i) => {
          const table = runs[i][from];
          const x = axis === "seconds" ? table.seconds.map((value) => value && value / 60) : table[axis];
          return { name: runs[i].name, ...look[i], thin, x, y: table[kind] };
        });
        const averaged = Math.max(...[...shownRuns].map((i) => runs[i][from].each[0]), 1);
        const title = figure.querySelector("figcaption").textContent;
        lines(place, width, { title, curves, xName: AXES[axis], yText, tipX, log: logarithmic && !share });
        if (averaged > 1) place.append(html("p", {}, `Each point is the mean of up to ${averaged} lines.`));
      }),
    );
  }

  function curveControls() {
    const place = document.getElementById("controls");
    if (!place) return;
    const buttons = html("div", { class: "runs", role: "group", "aria-label": "Runs shown" });
    runs.forEach((run, i) => {
      const style = `stroke:${look[i].colour};stroke-width:2.5;stroke-dasharray:${look[i].dash || "none"}`;
      const sample = draw("svg", { "aria-hidden": "true" }, draw("line", { x1: 0, x2: 22, y1: 4, y2: 4, style }));
      const button = html("button", { type: "button", "aria-pressed": "true" }, sample, run.name);
      button.addEventListener("click", () => {
        if (!shownRuns.delete(i)) shownRuns.add(i);
        button.setAttribute("aria-pressed", String(shownRuns.has(i)));
        for (const again of redraws) again();
      });
      buttons.append(button);
    });
    const choice = html("select", {}, ...Object.entries(AXES).map(([value, name]) => html("option", { value }, name)));
    choice.addEventListener("change", () => {
      axis = choice.value;
      for (const again of redraws) again();
    });
    const log = html("input", { type: "checkbox" });
    log.addEventListener("change", () => {
      logarithmic = log.checked;
      for (const again of redraws) again();
    });
    place.append(buttons, html("label", {}, "over", choice), html("label", {}, log, "logarithmic loss"));
  }

  // Bytes of all tensors through one training step, one area above the other.

  function stepChart(figure) {
    const curves = JSON.parse(figure.dataset.curves).map((curve, i) => ({
      ...curve,
      colour: i ? `var(--run-${(i - 1) % COLOURS})` : "var(--ink)",
    }));
    responsive(figure, (place, width) => {
      const height = width < 500 ? 250 : 320;
      const highest = Math.max(...curves.map((curve) => curve.peak_bytes), 1);
      const unit = highest >= 1e9 ? [1e9, "GB"] : highest >= 1e6 ? [1e6, "MB"] : [1e3, "kB"];
      const marks = ticks(0, highest / unit[0], 5);
      const text = (value) => `${short(value)} ${unit[1]}`;
      const margin = 12 + 7 * Math.max(...marks.map((value) => text(value).length));
      const [bottom, right] = [height - 34, width - 14];
      const vertical = scale(0, (highest / unit[0]) * 1.12, bottom, 8);
      const horizontal = scale(0, 1, margin, right);
      const at = (done, bytes) => [horizontal(done), vertical(bytes / unit[0])];
      const svg = canvas(width, height, figure.querySelector("figcaption").textContent);
      for (const value of marks) {
        const y = vertical(value);
        svg.append(draw("line", { class: "rule", x1: margin, x2: right, y1: y, y2: y }));
        svg.append(draw("text", { x: margin - 8, y: y + 4, "text-anchor": "end" }, text(value)));
      }
      for (const value of [0, 0.25, 0.5, 0.75, 1]) {
        const anchor = value < 1 ? "middle" : "end";
        const place = { x: horizontal(value), y: height - 16, "text-anchor": anchor };
        svg.append(draw("text", place, `${100 * value} %`));
      }
      svg.append(draw("text", { x: right, y: height - 1, "text-anchor": "end" }, "of the step"));
      for (const curve of curves) {
        const count = curve.bytes.length;
        const points = curve.bytes.map((bytes, i) => at((i + 0.5) / count, bytes));
        const path = points.map(([x, y]) => `${x.toFixed(1)} ${y.toFixed(1)}`).join("L");
        const [first, last] = [points[0][0].toFixed(1), points.at(-1)[0].toFixed(1)];
        const area = `M${first} ${bottom}L${path}L${last} ${bottom}z`;
        svg.append(draw("path", { d: area, style: `fill:${curve.colour};opacity:0.14` }));
        svg.append(draw("path", { class: "curve", d: `M${path}`, style: `stroke:${curve.colour}` }));
        const turn = curve.forward_seconds / curve.seconds;
        const [x, y] = at(turn, curve.bytes[Math.min(count - 1, Math.floor(turn * count))]);
        const style = `stroke:${curve.colour};stroke-dasharray:1 3`;
        svg.append(draw("line", { x1: x, x2: x, y1: bottom, y2: y, style }));
      }
      const [turn, rest] = at(curves[0].forward_seconds / curves[0].seconds, curves[0].resting_bytes);
      svg.append(draw("line", { class: "cursor", x1: margin, x2: right, y1: rest, y2: rest }));
      if (bottom - rest > 40) svg.append(draw("text", { x: margin + 6, y: rest + 16 }, "weights, optimizer, data"));
      svg.append(draw("text", { x: turn - 7, y: bottom - 7, "text-anchor": "end" }, "forward"));
      svg.append(draw("text", { x: turn + 12, y: bottom - 7 }, "backward"));
      for (const curve of curves) {
        const highestAt = curve.bytes.indexOf(Math.max(...curve.bytes));
        const [x, y] = at((highestAt + 0.5) / curve.bytes.length, curve.peak_bytes);
        svg.append(draw("circle", { cx: x, cy: y, r: 4, style: `fill:${curve.colour}` }));
        const peak = `peak ${size(curve.peak_bytes)}`;
        const most = Math.floor((right - margin) / 8.2) - peak.length - 2;
        const label = `${shortened(curve.name, most)}: ${peak}`;
        const half = label.length * 4.1;
        const middle = Math.max(margin + half, Math.min(right - half, x));
        const named = { class: "peak", x: middle, y: y - 9, "text-anchor": "middle", style: `fill:${curve.colour}` };
        svg.append(draw("text", named, label));
      }
      place.replaceChildren(svg);
    });
  }

  // Bytes of every layer before and after, with the names of groups of layers below.

  function groups(names) {
    const split = names.map((name) => name.split("."));
    let best = [];
    for (let depth = 1; depth <= Math.max(...split.map((parts) => parts.length)); depth++) {
      const found = [];
      split.forEach((parts, i) => {
        const name = parts.slice(0, depth).join(".");
        if (found.length && found.at(-1).name === name) found.at(-1).end = i + 1;
        else found.push({ name, start: i, end: i + 1 });
      });
      if (depth > 1 && found.length > 24) break;
      best = found;
    }
    return best;
  }

  function memoryChart(figure) {
    const layers = runs[figure.dataset.run].memory;
    responsive(figure, (place, width) => {
      const height = 230;
      const highest = Math.max(...layers.map((layer) => Math.max(layer.saved, layer.packed)), 1);
      const unit = highest >= 1e9 ? [1e9, "GB"] : highest >= 1e6 ? [1e6, "MB"] : [1e3, "kB"];
      const vertical = scale(0, highest / unit[0], height - 30, 10);
      const marks = ticks(0, highest / unit[0], 4);
      const text = (value) => `${short(value)} ${unit[1]}`;
      const margin = 12 + 7 * Math.max(...marks.map((value) => text(value).length));
      const each = Math.min(80, (width - margin - 4) / layers.length);
      const gap = each > 6 ? Math.min(4, each * 0.2) : each > 3 ? 1 : 0;
      const svg = canvas(width, height, figure.querySelector("figcaption").textContent);
      for (const value of marks) {
        const y = vertical(value);
        svg.append(draw("line", { class: "rule", x1: margin, x2: width - 4, y1: y, y2: y }));
        svg.append(draw("text", { x: margin - 8, y: y + 4, "text-anchor": "end" }, text(value)));
      }
      const bar = (kind, i, bytes) => {
        const [x, y] = [margin + i * each + gap / 2, vertical(bytes / unit[0])];
        return draw("rect", { class: kind, x, y, width: each - gap, height: vertical(0) - y });
      };
      layers.forEach((layer, i) => svg.append(bar("saved", i, layer.saved), bar("packed", i, layer.packed)));
      let free = 0;
      for (const { name, start, end } of groups(layers.map((layer) => layer.layer))) {
        const [x0, x1] = [margin + start * each, margin + end * each];
        const half = name.length * 3.3;
        const middle = Math.min((x0 + x1) / 2, width - half);
        const [from, to, y] = [x0 + 1, Math.max(x1 - 1, x0 + 2), height - 26];
        svg.append(draw("line", { class: "axis", x1: from, x2: to, y1: y, y2: y }));
        if (middle - half < free) continue;
        free = middle + half + 8;
        svg.append(draw("text", { x: middle, y: height - 11, "text-anchor": "middle" }, name));
      }
      const box = draw("rect", { class: "chosen", y: 6, width: each, height: height - 36, visibility: "hidden" });
      svg.append(box);
      onPoint(
        svg,
        (event, px) => {
          const i = Math.floor((px - margin) / each);
          if (!layers[i]) return false;
          box.setAttribute("x", margin + i * each);
          box.setAttribute("visibility", "visible");
          const { layer, saved, packed } = layers[i];
          tell(event, layer, [
            { colour: "var(--soft)", text: `saved ${size(saved)}` },
            { colour: "var(--accent)", text: `packed ${size(packed)}` },
            { text: packed ? `ratio ${significant(saved / packed, 3)}` : "nothing is held" },
          ]);
          return true;
        },
        () => box.setAttribute("visibility", "hidden"),
      );
      const legend = html("div", { class: "legend" });
      for (const [name, colour] of [["saved (before)", "var(--soft)"], ["packed (after)", "var(--accent)"]]) {
        legend.append(html("span", {}, key(colour), name));
      }
      place.replaceChildren(legend, svg);
    });
  }

  // Ratio, bits or bound of every site over time: a map of all, and curves of a chosen one.

  const VIEWS = { ratio: "ratio", bits: "bits", abs: "absolute bound", rel: "relative bound" };
  const SHADES = 16;
  const shade = (part) => `color-mix(in oklab, var(--high) ${(100 * part).toFixed(1)}%, var(--low))`;

  function historyChart(figure) {
    const { axis: xName, steps, sites, settings, ratio, setting } = runs[figure.dataset.run].history;
    const value = (view, row, column) => {
      const which = settings[setting[row][column]];
      if (which === undefined) return null;
      return view === "ratio" ? ratio[row][column] : (which[view] ?? null);
    };
    const values = (view, row) => steps.map((_, column) => value(view, row, column));
    const known = (view, row) => values(view, row).filter((found) => found !== null);
    const views = Object.keys(VIEWS).filter((view) => sites.some((_, row) => known(view, row).length));
    if (!views.length) {
      figure.querySelector(".place").replaceChildren(html("p", {}, "Nothing to draw: no ratio is known."));
      return;
    }
    let view = views[0];
    let chosen = sites.reduce((most, site, row) => (site.saved > sites[most].saved ? row : most), 0);

    const viewChoice = html("select", {}, ...views.map((name) => html("option", { value: name }, VIEWS[name])));
    const siteChoice = html("select", {}, ...sites.map((site, row) => html("option", { value: row }, site.name)));
    siteChoice.value = String(chosen);
    const map = html("div");
    const one = html("div", { class: "grid bare" });
    const place = figure.querySelector(".place");
    const labels = [html("label", {}, "show", viewChoice), html("label", {}, "site", siteChoice)];
    place.before(html("div", { class: "controls" }, ...labels));
    place.replaceChildren(map, one);
    const again = responsive(figure, (_, width) => {
      heat(map, width);
      single(one);
    });
    viewChoice.addEventListener("change", () => {
      view = viewChoice.value;
      again();
    });
    siteChoice.addEventListener("change", () => {
      chosen = Number(siteChoice.value);
      again();
    });

    function heat(place, width) {
      const tall = Math.max(4, Math.min(18, Math.floor(560 / sites.length)));
      const longest = Math.max(...sites.map((site) => site.name.length));
      const margin = Math.min(14 + longest * 6.6, width * 0.4);
      const wide = (width - margin - 20) / steps.length;
      const edge = (column) => Math.round(margin + column * wide);
      const top = 4;
      const height = top + tall * sites.length + 36;
      const svg = canvas(width, height, `${VIEWS[view]} of ${sites.length} sites at ${steps.length} times`);
      let [low, high] = [Infinity, 0];
      for (const found of sites.flatMap((_, row) => known(view, row))) {
        if (found > 0) [low, high] = [Math.min(low, found), Math.max(high, found)];
      }
      if (!high) [low, high] = [1, 1];
      const part = (found) => (low === high ? 0.5 : Math.log(Math.max(found, low) / low) / Math.log(high / low));
      const paths = Array.from({ length: SHADES }, () => "");
      sites.forEach((_, row) => {
        let begin = 0;
        const level = (column) => {
          const found = value(view, row, column);
          if (found !== null) return Math.round(part(found) * (SHADES - 1));
          // What costs nothing has no ratio; nothing is better.
          return view === "ratio" && setting[row][column] >= 0 ? SHADES - 1 : null;
        };
        for (let column = 1; column <= steps.length; column++) {
          if (column < steps.length && level(column) === level(begin)) continue;
          if (level(begin) !== null) {
            const [from, to, y] = [edge(begin), edge(column), top + row * tall];
            paths[level(begin)] += `M${from} ${y}H${to}v${tall > 7 ? tall - 1 : tall}H${from}z`;
          }
          begin = column;
        }
      });
      paths.forEach((d, level) => {
        const style = `fill:${shade(level / (SHADES - 1))};shape-rendering:crispEdges`;
        if (d) svg.append(draw("path", { d, style }));
      });
      const every = Math.ceil(13 / tall);
      const letters = Math.floor((margin - 14) / 6.6);
      sites.forEach((site, row) => {
        if (row % every) return;
        const place = { x: margin - 8, y: top + row * tall + tall / 2 + 4, "text-anchor": "end" };
        svg.append(draw("text", place, shortened(site.name, letters)));
      });
      const marks = Math.max(1, Math.min(steps.length, Math.floor((width - margin) / 80)));
      for (let i = 0; i < marks; i++) {
        const column = marks === 1 ? 0 : Math.round((i * (steps.length - 1)) / (marks - 1));
        const x = margin + (column + 0.5) * wide;
        svg.append(draw("text", { x, y: height - 20, "text-anchor": "middle" }, short(steps[column])));
      }
      svg.append(draw("text", { x: width - 20, y: height - 4, "text-anchor": "end" }, xName));
      const across = edge(steps.length) - margin + 2;
      const y = top + chosen * tall - 1;
      svg.append(draw("rect", { class: "chosen", x: margin - 1, y, width: across, height: tall + 2 }));
      const find = (px, py) => [Math.floor((py - top) / tall), Math.floor((px - margin) / wide)];
      onPoint(
        svg,
        (event, px, py) => {
          const [at, column] = find(px, py);
          if (!sites[at]) return false;
          const now = Math.max(0, Math.min(steps.length - 1, column));
          const which = settings[setting[at][now]];
          const told = [{ text: `${xName} ${whole(steps[now])}` }];
          if (which === undefined) told.push({ text: "not saved" });
          else {
            told.push({ text: [which.codec, which.bound].filter(Boolean).join(", ") });
            const found = ratio[at][now];
            told.push({ text: found === null ? "nothing is held" : `ratio ${significant(found, 3)}` });
          }
          told.push({ text: `saved ${size(sites[at].saved)}` });
          tell(event, sites[at].name, told);
          return true;
        },
        () => {},
      );
      svg.addEventListener("click", (event) => {
        const box = svg.getBoundingClientRect();
        const [at] = find(event.clientX - box.left, event.clientY - box.top);
        if (!sites[at]) return;
        chosen = at;
        siteChoice.value = String(at);
        again();
      });
      const ramp = html("span", { class: "ramp" });
      ramp.style.background = `linear-gradient(to right in oklab, ${shade(0)}, ${shade(1)})`;
      const lowest = `${VIEWS[view]} ${significant(low, 3)}`;
      const range = low === high ? [`${lowest} everywhere`] : [lowest, ramp, significant(high, 3)];
      const hint = html("span", {}, "A click chooses a site.");
      const legend = html("div", { class: "legend" }, html("span", {}, ...range), hint);
      place.replaceChildren(legend, html("div", { class: "scroll" }, svg));
    }

    function single(place) {
      const site = sites[chosen];
      const curves = views
        .map((name) => ({ name: VIEWS[name], x: steps, y: values(name, chosen), stepped: name !== "ratio" }))
        .filter(({ y }) => y.some((found) => found !== null));
      const spots = curves.map(() => html("div"));
      const titles = curves.map(({ name }) => `${name} over time: ${site.name}`);
      place.replaceChildren(...spots.map((spot, i) => html("div", {}, html("p", {}, titles[i]), spot)));
      curves.forEach((curve, i) => {
        lines(spots[i], spots[i].clientWidth, {
          title: titles[i],
          curves: [{ ...curve, colour: "var(--accent)", dash: "" }],
          xName,
          yText: (y) => significant(y, 3),
          tipX: (x) => `${site.name}, ${xName} ${whole(x)}`,
          height: 150,
        });
      });
    }
  }

  curveControls();
  for (const figure of document.querySelectorAll("figure[data-chart]")) {
    const kind = figure.dataset.chart;
    if (kind === "memory") memoryChart(figure);
    else if (kind === "step") stepChart(figure);
    else if (kind === "history") historyChart(figure);
    else curvesChart(figure);
  }
})();
