// The read-out: one crosshair over all plots, and the values there in their legends.
// The plots are drawn already, and their scales are switched by the style sheet.
"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const readout = document.getElementById("readout");
  const isOn = (id) => document.getElementById(id)?.checked;
  const axisNow = () => (isOn("x-tokens") ? "tokens" : "steps");

  // The rules of units.py.
  const SI = ["", "k", "M", "G", "T", "P"];
  const digits = (v) => {
    const size = Math.abs(v);
    if (size === 0) return "0";
    if (size < 1e-3 || size >= 1e6) {
      const [mantissa, exponent] = v.toExponential(3).split("e");
      return `${+mantissa}e${+exponent}`;
    }
    if (size >= 1000) return Math.round(v).toLocaleString("en-US");
    return String(+v.toPrecision(4));
  };
  const stepped = (v, base, names) => {
    let power = 0;
    while (Math.abs(v) >= base && power < names.length - 1) { v /= base; power += 1; }
    return +v.toPrecision(4) + (names[0] ? " " : "") + names[power];
  };
  const textOf = (v, unit) => {
    switch (unit) {
      case "share": return `${digits(v * 100)} %`;
      case "seconds": return v !== 0 && Math.abs(v) < 1 ? `${digits(v * 1000)} ms` : `${digits(v)} s`;
      case "MB": return stepped(v, 1000, ["MB", "GB", "TB"]);
      case "MiB": return stepped(v, 1024, ["MiB", "GiB", "TiB"]);
      case "count": return Math.abs(v) >= 1e4
        ? stepped(v, 1000, SI) : (+v.toPrecision(5)).toLocaleString("en-US");
      case "TFLOP/s": return stepped(v * 1e12, 1000, SI.map((prefix) => `${prefix}FLOP/s`));
      case "W": case "°C": return `${digits(v)} ${unit}`;
      default: return digits(v);
    }
  };

  const add = (parent, name) => {
    const element = document.createElement("div");
    element.className = name;
    element.hidden = true;
    parent.append(element);
    return element;
  };

  const plots = [...document.querySelectorAll("figure.panel")].map((figure) => {
    const canvas = figure.querySelector(".canvas");
    const plot = { figure, canvas, area: figure.querySelector(".plot"), cross: add(canvas, "cross") };
    if ("panel" in figure.dataset) {
      plot.panel = data.panels[figure.dataset.panel];
      plot.values = [...figure.querySelectorAll(".legend b")];
      plot.last = plot.values.map((element) => element.textContent);
      plot.spots = plot.panel.series.map((series, i) => {
        const color = figure.querySelectorAll(".legend .key")[i].className.match(/c\d/)[0];
        return series.dot ? add(canvas, `spot ${color}`) : null;
      });
    } else {
      plot.heat = data.heats[figure.dataset.heat];
      plot.cell = figure.querySelector(".cell");
    }
    return plot;
  });

  const nearest = (sorted, at) => {
    let low = 0, high = sorted.length - 1;
    while (high - low > 1) {
      const middle = (low + high) >> 1;
      if (sorted[middle] < at) low = middle; else high = middle;
    }
    return Math.abs(sorted[low] - at) <= Math.abs(sorted[high] - at) ? low : high;
  };

  const heightOf = (scales, v) => {
    const isLog = scales.log && isOn("y-log");
    const [low, high] = isLog ? scales.log : scales.linear;
    const place = isLog ? Math.log(v / low) / Math.log(high / low) : (v - low) / (high - low);
    return Math.min(1, Math.max(0, place));
  };

  // Strength of color is value: it is read back from the picture.
  const pixels = (plot, axis) => {
    plot.read ??= {};
    if (!plot.read[axis]) {
      const image = plot.canvas.querySelector(`img.${axis}`);
      const board = document.createElement("canvas");
      [board.width, board.height] = [image.naturalWidth, image.naturalHeight];
      if (!board.width) return null;
      const context = board.getContext("2d", { willReadFrequently: true });
      context.drawImage(image, 0, 0);
      plot.read[axis] = context.getImageData(0, 0, board.width, board.height);
    }
    return plot.read[axis];
  };

  const showCell = (plot, axis, x, y) => {
    const image = pixels(plot, axis);
    if (!image) return;
    const column = Math.min(image.width - 1, Math.floor(x * image.width));
    const row = Math.min(image.height - 1, Math.max(0, Math.floor(y * image.height)));
    const alpha = image.data[4 * (row * image.width + column) + 3];
    const [low, high] = plot.heat.range;
    const level = ((alpha - 14) * 255) / (255 - 14);
    const share = Math.max(0, level - 1) / 254;
    const value = plot.heat.log ? low * (high / low) ** share : low + (high - low) * share;
    const name = plot.heat.rows[row].replace(/^(model\.)?layers\./, "");
    plot.cell.textContent = alpha ? `${name}: ${textOf(+value.toPrecision(3), plot.heat.unit)}` : name;
  };

  const show = (x, from, y) => {
    const axis = axisNow(), at = x * data.axes[axis];
    for (const plot of plots) {
      plot.cross.hidden = false;
      plot.cross.style.left = `${100 * x}%`;
      if (plot.heat) {
        if (plot === from) showCell(plot, axis, x, y); else plot.cell.textContent = "";
        continue;
      }
      plot.panel.series.forEach((series, i) => {
        const places = data.xs[series.x][axis];
        const found = nearest(places, at);
        const value = series.y[found];
        plot.values[i].textContent = value === null ? "–" : textOf(value, plot.panel.unit);
        const spot = plot.spots[i];
        if (!spot) return;
        spot.hidden = value === null;
        if (value === null) return;
        spot.style.left = `${(100 * places[found]) / data.axes[axis]}%`;
        spot.style.bottom = `${100 * heightOf(plot.panel.scales, value)}%`;
      });
    }
    tell(axis, at);
  };

  const tell = (axis, at) => {
    const here = document.createElement("b");
    here.textContent = axis === "steps" ? `step ${Math.round(at).toLocaleString("en-US")}`
      : `${textOf(at, "count")} tokens`;
    const near = data.events
      .filter((event) => Math.abs(event.at[axis] - at) <= data.axes[axis] * 0.008);
    const names = [...new Set(near.map((event) => event.text))].slice(0, 3).join(", ");
    readout.replaceChildren(here, names ? ` · ${names}` : "");
  };

  const hide = () => {
    readout.replaceChildren();
    for (const plot of plots) {
      plot.cross.hidden = true;
      if (plot.heat) { plot.cell.textContent = ""; continue; }
      plot.values.forEach((element, i) => { element.textContent = plot.last[i]; });
      plot.spots.forEach((spot) => { if (spot) spot.hidden = true; });
    }
  };

  let now = 0.5, row = 0;
  for (const plot of plots) {
    plot.canvas.addEventListener("pointermove", (event) => {
      const box = plot.canvas.getBoundingClientRect();
      now = Math.min(1, Math.max(0, (event.clientX - box.left) / box.width));
      show(now, plot, (event.clientY - box.top) / box.height);
    });
    plot.canvas.addEventListener("pointerleave", hide);
    plot.area.addEventListener("keydown", (event) => {
      const steps = { ArrowLeft: [-0.01, 0], ArrowRight: [0.01, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] }[event.key];
      if (!steps || (steps[1] && !plot.heat)) return;
      event.preventDefault();
      now = Math.min(1, Math.max(0, now + steps[0]));
      if (plot.heat) row = Math.min(plot.heat.rows.length - 1, Math.max(0, row + steps[1]));
      show(now, plot, plot.heat ? (row + 0.5) / plot.heat.rows.length : 0);
    });
    plot.area.addEventListener("blur", hide);
  }
})();
