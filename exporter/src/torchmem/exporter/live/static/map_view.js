// The memory map on a canvas: all bytes in rows, as text is in lines, to scale.
//
// A pixel that holds several parts shows their shares one above the other, so that stranded bytes
// between many small blocks are as visible as the bytes of one large block.

import { indexAt, STATES } from "./memory_layout.js";

const ROW = 22; // CSS pixels
const ROW_GAP = 5;
const MIN_SPAN = 4096; // bytes in a row
const MIN_EDGE = 4; // device pixels of a part that gets an edge
const MIN_SEGMENT_GAP = 8;
const MIN_LABEL = 58; // CSS pixels
const MAX_LABELS = 400;
const MIN_OUTLINE = 10; // CSS pixels; what is narrower gets a mark below it when it is selected

/** Draws a layout into a canvas, and keeps what part of it is in view. */
export class MapView {
  /** `format` writes a number of bytes. */
  constructor(canvas, format) {
    this.canvas = canvas;
    this.format = format;
    this.context = canvas.getContext("2d", { alpha: false });
    this.layout = null;
    this.shares = new Float64Array(STATES.length);
    this.start = 0;
    this.span = 1;
    this.selected = null;
    this.hovered = null;
    this.frames = 0;
    this.drawMilliseconds = 0;
    this.pending = 0;
    this.resize();
  }

  /** Show another layout; what is in view stays, unless all of it was in view. */
  setLayout(layout) {
    const wasWhole = this.layout === null || this.isWhole();
    this.layout = layout;
    if (wasWhole) this.fit();
    else this.moveTo(this.start, this.span);
  }

  /** Set the colors: one for each state, and `surface`, `edge`, `ink`, `focus` as [r, g, b]. */
  setColors(colors) {
    this.colors = colors;
    this.words = STATES.map((state) => word(colors[state]));
    this.edges = STATES.map((state) => word(mixed(colors[state], colors.surface, 0.45)));
    this.background = word(colors.surface);
    this.redraw();
  }

  /** Adapt to the size of the canvas in the page. */
  resize() {
    const wasWhole = this.layout !== null && this.isWhole();
    const { width, height } = this.canvas.getBoundingClientRect();
    this.scale = Math.min(window.devicePixelRatio || 1, 2);
    this.width = Math.max(1, Math.round(width * this.scale));
    this.rowHeight = Math.round(ROW * this.scale);
    this.rowStep = Math.round((ROW + ROW_GAP) * this.scale);
    this.height = Math.max(this.rowStep, Math.round(height * this.scale));
    this.rows = Math.max(1, Math.floor((this.height + ROW_GAP * this.scale) / this.rowStep));
    if (this.canvas.width !== this.width || this.canvas.height !== this.height) {
      this.canvas.width = this.width;
      this.canvas.height = this.height;
    }
    this.image = this.context.createImageData(this.width, this.rowHeight);
    this.pixels = new Uint32Array(this.image.data.buffer);
    if (wasWhole) this.fit();
    else this.redraw();
  }

  /** Return whether everything is in view. */
  isWhole() {
    return this.span >= this.wholeSpan();
  }

  wholeSpan() {
    return Math.max(MIN_SPAN, (this.layout?.total ?? 1) / this.rows);
  }

  /** Bring everything into view. */
  fit() {
    this.moveTo(0, this.wholeSpan());
  }

  /** Show `span` bytes in each row, from the position `start` on. */
  moveTo(start, span) {
    const whole = this.wholeSpan();
    this.span = Math.min(whole, Math.max(MIN_SPAN, span));
    const last = Math.max(0, (this.layout?.total ?? 0) - this.span * this.rows);
    this.start = Math.min(last, Math.max(0, start));
    this.redraw();
  }

  /** Show fewer bytes by `factor`; the position at the CSS pixel x, y stays there. */
  zoom(factor, x, y) {
    const column = (x * this.scale) / this.width;
    const row = this.rowAt(y);
    const fixed = this.start + (row + column) * this.span;
    const span = Math.min(this.wholeSpan(), Math.max(MIN_SPAN, this.span / factor));
    this.moveTo(fixed - (row + column) * span, span);
  }

  /** Move the memory by CSS pixels. */
  pan(dx, dy) {
    const columns = (dx * this.scale) / this.width;
    const rows = (dy * this.scale) / this.rowStep;
    this.moveTo(this.start - (columns + rows) * this.span, this.span);
  }

  /** Bring the bytes from `from` to `to` into view; with `close` they fill about a row. */
  reveal(from, to, close = false) {
    if (close) {
      const span = Math.max(MIN_SPAN, (to - from) * 1.25);
      this.moveTo(from - (to - from) * 0.125 - Math.floor(this.rows / 2) * span, span);
    } else if (from < this.start || to > this.start + this.span * this.rows) {
      this.moveTo((from + to) / 2 - (this.rows / 2) * this.span, this.span);
    }
  }

  rowAt(y) {
    return Math.min(this.rows - 1, Math.max(0, Math.floor((y * this.scale) / this.rowStep)));
  }

  /** Return the position in the layout at a CSS pixel, or null beside it. */
  positionAt(x, y) {
    const inRow = (y * this.scale) % this.rowStep;
    const column = (x * this.scale) / this.width;
    if (!this.layout?.count || inRow > this.rowHeight || column < 0 || column >= 1) return null;
    if (y * this.scale >= this.rows * this.rowStep) return null;
    const position = this.start + (this.rowAt(y) + column) * this.span;
    return position < this.layout.total ? position : null;
  }

  /** Return the CSS rectangle of the first row that a range of bytes takes. */
  rectangleOf(from, to) {
    const row = Math.max(0, Math.floor((from - this.start) / this.span));
    const begin = this.start + row * this.span;
    const left = Math.max(0, (from - begin) / this.span) * this.width;
    const right = Math.min(1, (to - begin) / this.span) * this.width;
    const [x, y] = [left / this.scale, (row * this.rowStep) / this.scale];
    return { x, y, width: (right - left) / this.scale, height: this.rowHeight / this.scale };
  }

  /** Draw in the next frame. */
  redraw() {
    if (this.pending || !this.colors) return;
    this.pending = requestAnimationFrame(() => {
      this.pending = 0;
      const started = performance.now();
      this.draw();
      this.drawMilliseconds += performance.now() - started;
      this.frames += 1;
    });
  }

  draw() {
    const { context, layout } = this;
    context.fillStyle = css(this.colors.surface);
    context.fillRect(0, 0, this.width, this.height);
    if (!layout?.count) return;
    for (let row = 0; row < this.rows; row += 1) {
      const from = this.start + row * this.span;
      if (from >= layout.total) break;
      this.fillRow(from);
      context.putImageData(this.image, 0, row * this.rowStep);
    }
    this.drawLabels();
    if (this.hovered) this.outline(this.hovered, this.colors.ink, 1);
    if (this.selected) this.outline(this.selected, this.colors.focus, 2);
  }

  /** Fill the pixels of one row of `span` bytes. */
  fillRow(from) {
    const { layout, pixels, width } = this;
    const perPixel = this.span / width;
    pixels.fill(this.background);
    let part = indexAt(layout.start, layout.count, from);
    let x = 0;
    while (x < width) {
      const position = from + x * perPixel;
      if (position >= layout.total) break;
      while (layout.start[part + 1] <= position && part < layout.count - 1) part += 1;
      const end = Math.min(width, Math.floor((layout.start[part + 1] - from) / perPixel));
      if (end > x) {
        this.fillPart(part, x, end, from, perPixel);
        x = end;
      } else {
        part = this.fillMixed(part, x, position, Math.min(layout.total, position + perPixel));
        x += 1;
      }
    }
  }

  fillPart(part, x, end, from, perPixel) {
    const { layout, pixels, width, rowHeight } = this;
    const state = layout.state[part];
    const color = this.words[state];
    const whole = (layout.start[part + 1] - layout.start[part]) / perPixel;
    const ends = (layout.start[part + 1] - from) / perPixel <= width;
    const { segment, start, size } = layout.segments[layout.blockSegment[layout.block[part]]];
    const isLast = segment && layout.start[part + 1] >= start + size;
    const gap = isLast && ends && size / perPixel >= MIN_SEGMENT_GAP ? Math.min(2, end - x - 1) : 0;
    const edge = ends && !gap && whole >= MIN_EDGE && end - x > 1 ? 1 : 0;
    for (let y = 0; y < rowHeight; y += 1) {
      const line = y * width;
      pixels.fill(color, line + x, line + end - gap - edge);
      if (gap) pixels.fill(this.background, line + end - gap, line + end);
      if (edge) pixels[line + end - 1] = this.edges[state];
    }
  }

  /** Fill one column with the shares of all parts from `from` to `to`; return the last part. */
  fillMixed(first, x, from, to) {
    const { layout, pixels, width, rowHeight, shares, words } = this;
    const { start, state, count } = layout;
    shares.fill(0);
    let part = first;
    let begin = from;
    for (; part < count - 1 && start[part + 1] < to; part += 1) {
      shares[state[part]] += start[part + 1] - begin;
      begin = start[part + 1];
    }
    shares[state[part]] += to - begin;
    let y = rowHeight;
    let sum = 0;
    for (let index = 0; index < shares.length; index += 1) {
      if (shares[index] === 0) continue;
      sum += shares[index];
      const top = rowHeight - Math.round((sum / (to - from)) * rowHeight);
      for (; y > top; y -= 1) pixels[(y - 1) * width + x] = words[index];
    }
    return part;
  }

  /** Write the sizes of blocks that are wide enough. */
  drawLabels() {
    const { context, layout, scale } = this;
    const least = (MIN_LABEL * scale * this.span) / this.width;
    context.font = `${11 * scale}px system-ui, sans-serif`;
    context.textBaseline = "middle";
    let left = MAX_LABELS;
    for (let row = 0; row < this.rows && left > 0; row += 1) {
      const from = this.start + row * this.span;
      const to = Math.min(layout.total, from + this.span);
      let part = indexAt(layout.start, layout.count, from);
      for (; part < layout.count && layout.start[part] < to; part += 1) {
        const begin = layout.start[part];
        const length = Math.min(to, layout.start[part + 1]) - begin;
        if (length < least || begin < from) continue;
        this.label(part, row, begin - from, length);
        left -= 1;
      }
    }
  }

  label(part, row, offset, length) {
    const { context, layout, scale } = this;
    const text = this.format(layout.start[part + 1] - layout.start[part]);
    const room = (length / this.span) * this.width - 10 * scale;
    if (context.measureText(text).width > room) return;
    const color = this.colors[STATES[layout.state[part]]];
    context.fillStyle = luminance(color) > 0.18 ? "#10161e" : "#ffffff";
    const x = (offset / this.span) * this.width + 6 * scale;
    context.fillText(text, x, row * this.rowStep + this.rowHeight / 2 + scale);
  }

  /** Outline a range of bytes in each row that it takes. */
  outline([from, to], color, thickness) {
    const { context, scale } = this;
    const first = Math.max(0, Math.floor((from - this.start) / this.span));
    context.lineWidth = thickness * scale;
    context.strokeStyle = css(color);
    for (let row = first; row < this.rows; row += 1) {
      const begin = this.start + row * this.span;
      if (begin >= to) break;
      const x = (Math.max(0, from - begin) / this.span) * this.width;
      const end = Math.min(1, (to - begin) / this.span) * this.width;
      const width = Math.max(3 * scale, end - x);
      context.strokeRect(x, row * this.rowStep, width, this.rowHeight);
      if (thickness > 1 && width < MIN_OUTLINE * scale && row === first) {
        context.fillStyle = css(color);
        context.fillRect(x - 3 * scale, row * this.rowStep + this.rowHeight, width + 6 * scale, 3 * scale);
      }
    }
  }
}

const word = ([red, green, blue]) => ((255 << 24) | (blue << 16) | (green << 8) | red) >>> 0;
const css = ([red, green, blue]) => `rgb(${red}, ${green}, ${blue})`;

/** Return a color between two: `share` of the second one. */
export function mixed(color, other, share) {
  return color.map((value, index) => Math.round(value * (1 - share) + other[index] * share));
}

/** Return a CSS color such as #4e84fc as [red, green, blue]. */
export function parsed(text) {
  const digits = text.replace("#", "");
  const wide = digits.length === 3 ? [...digits].map((digit) => digit + digit).join("") : digits;
  return [0, 2, 4].map((index) => parseInt(wide.slice(index, index + 2), 16) || 0);
}

function luminance(color) {
  const [red, green, blue] = color.map((value) => {
    const share = value / 255;
    return share <= 0.04045 ? share / 12.92 : ((share + 0.055) / 1.055) ** 2.4;
  });
  return 0.2126 * red + 0.7152 * green + 0.0722 * blue;
}
