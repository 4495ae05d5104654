// SPDX-License-Identifier: Apache-2.0
// A map of cells on the page of `weft ui`. page.js says which cells there are, and their colours.
'use strict';

const root = document.documentElement;

function colour(name) {
  return getComputedStyle(root).getPropertyValue(name).trim();
}

// A map of cells that can be moved and zoomed. Drawing is one copy of a picture, however many cells there are.
class CellMap {
  constructor(canvas, columns, rows, describe, enter) {
    Object.assign(this, { canvas, columns, rows, describe, enter, x: 0, y: 0, zoom: 1, cursor: null });
    this.picture = document.createElement('canvas');
    this.context = canvas.getContext('2d');
    canvas.addEventListener('wheel', (event) => {
      event.preventDefault();
      this.scale(event.deltaY < 0 ? 1.25 : 0.8, event.offsetX, event.offsetY);
    }, { passive: false });
    canvas.addEventListener('pointerdown', (event) => { this.drag = [event.offsetX, event.offsetY, false]; canvas.setPointerCapture(event.pointerId); });
    canvas.addEventListener('pointermove', (event) => this.pointer(event));
    canvas.addEventListener('pointerup', (event) => {
      const moved = this.drag && this.drag[2];
      this.drag = null;
      if (!moved) { this.point(event); canvas.focus(); }
    });
    canvas.addEventListener('dblclick', () => this.enter && this.cursor && this.enter(...this.cursor));
    canvas.addEventListener('keydown', (event) => this.key(event));
    new ResizeObserver(() => this.fit()).observe(canvas.parentElement);
  }

  // Takes one colour for each cell.
  fill(columns, rows, colourOf) {
    const changed = columns !== this.columns || rows !== this.rows;
    Object.assign(this, { columns, rows });
    // Another cell is at its place now, or none.
    if (changed) this.cursor = null;
    this.picture.width = Math.max(columns, 1);
    this.picture.height = Math.max(rows, 1);
    const context = this.picture.getContext('2d');
    const image = context.createImageData(this.picture.width, this.picture.height);
    for (let cell = 0, at = 0; cell < columns * rows; cell += 1, at += 4) {
      const rgb = colourOf(cell);
      if (!rgb) continue;
      image.data[at] = rgb[0]; image.data[at + 1] = rgb[1]; image.data[at + 2] = rgb[2]; image.data[at + 3] = 255;
    }
    context.putImageData(image, 0, 0);
    // What is said of the chosen cell may be old now, and without a chosen cell nothing is said.
    this.describe(...(this.cursor || []));
    if (changed || !this.zoom || !this.least) this.fit(); else this.paint();
  }

  fit() {
    const { clientWidth: width, clientHeight: height } = this.canvas.parentElement;
    if (!width) return;
    const dense = window.devicePixelRatio || 1;
    this.canvas.width = width * dense;
    this.canvas.height = height * dense;
    this.canvas.style.width = `${width}px`;
    this.canvas.style.height = `${height}px`;
    this.least = Math.min(width / this.columns, height / this.rows);
    this.zoom = Math.min(this.least, 40);
    this.x = this.y = 0;
    this.paint();
  }

  scale(factor, x, y) {
    const zoom = Math.min(Math.max(this.zoom * factor, Math.min(this.least, 40)), 64);
    this.x = (this.x + x) * zoom / this.zoom - x;
    this.y = (this.y + y) * zoom / this.zoom - y;
    this.zoom = zoom;
    this.draw();
  }

  draw() {
    if (this.waits) return;
    this.waits = true;
    requestAnimationFrame(() => { this.waits = false; this.paint(); });
  }

  paint() {
    const { canvas, context, zoom } = this;
    const dense = window.devicePixelRatio || 1;
    const [width, height] = [canvas.width / dense, canvas.height / dense];
    this.x = Math.max(0, Math.min(this.x, this.columns * zoom - width));
    this.y = Math.max(0, Math.min(this.y, this.rows * zoom - height));
    context.setTransform(dense, 0, 0, dense, 0, 0);
    context.clearRect(0, 0, width, height);
    context.imageSmoothingEnabled = zoom < 1;
    context.drawImage(this.picture, -this.x, -this.y, this.columns * zoom, this.rows * zoom);
    if (zoom >= 8) this.grid(width, height);
    if (this.cursor) {
      context.strokeStyle = colour('--fg');
      context.lineWidth = 2;
      context.strokeRect(this.cursor[0] * zoom - this.x, this.cursor[1] * zoom - this.y, zoom, zoom);
    }
  }

  grid(width, height) {
    const { context, zoom } = this;
    context.strokeStyle = colour('--bg');
    context.lineWidth = 1;
    context.beginPath();
    for (let x = -this.x % zoom; x <= Math.min(width, this.columns * zoom); x += zoom) { context.moveTo(x, 0); context.lineTo(x, height); }
    for (let y = -this.y % zoom; y <= Math.min(height, this.rows * zoom); y += zoom) { context.moveTo(0, y); context.lineTo(width, y); }
    context.stroke();
  }

  pointer(event) {
    // No event may have said that the button was released, as over the menu of the right button.
    if (!event.buttons) this.drag = null;
    if (!this.drag) return this.point(event);
    const [x, y, moved] = this.drag;
    const far = moved || Math.hypot(event.offsetX - x, event.offsetY - y) > 4;
    if (!far) return;
    this.x += x - event.offsetX;
    this.y += y - event.offsetY;
    this.drag = [event.offsetX, event.offsetY, true];
    this.draw();
  }

  point(event) {
    this.move(Math.floor((event.offsetX + this.x) / this.zoom), Math.floor((event.offsetY + this.y) / this.zoom));
  }

  move(x, y) {
    if (x < 0 || y < 0 || x >= this.columns || y >= this.rows) return;
    this.cursor = [x, y];
    this.describe(x, y);
    this.draw();
  }

  key(event) {
    const [x, y] = this.cursor || [0, 0];
    const step = event.shiftKey ? 10 : 1;
    const moves = { ArrowLeft: [-step, 0], ArrowRight: [step, 0], ArrowUp: [0, -step], ArrowDown: [0, step] };
    const by = moves[event.key];
    if (by) {
      this.move(Math.min(Math.max(x + by[0], 0), this.columns - 1), Math.min(Math.max(y + by[1], 0), this.rows - 1));
      this.show();
    } else if (event.key === '+' || event.key === '=') this.scale(1.25, x * this.zoom - this.x, y * this.zoom - this.y);
    else if (event.key === '-') this.scale(0.8, x * this.zoom - this.x, y * this.zoom - this.y);
    else if (event.key === 'Enter' && this.cursor && this.enter) this.enter(x, y);
    else return;
    event.preventDefault();
  }

  // Moves the map so that the cursor is on it.
  show() {
    if (!this.cursor) return;
    const [x, y] = [this.cursor[0] * this.zoom, this.cursor[1] * this.zoom];
    const { clientWidth: width, clientHeight: height } = this.canvas.parentElement;
    if (x < this.x) this.x = x;
    if (y < this.y) this.y = y;
    if (x + this.zoom > this.x + width) this.x = x + this.zoom - width;
    if (y + this.zoom > this.y + height) this.y = y + this.zoom - height;
    this.draw();
  }
}
