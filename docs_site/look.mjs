// Photographs pages at 390 and 1200 px, light and dark, and reports what a reader would stumble over:
//   node docs_site/look.mjs OUT FOLDER-OR-FILE... [--only REGEX] [--no-pictures]
// Reported: pages wider than the screen, pictures without words or that do not load, requests to other machines, text
// with less contrast than 4.5 to 1 (3 to 1 for large text: WCAG 2.2, 1.4.3), and errors of scripts. Exit code 1 if any.
// Needs node, Chromium (CHROMIUM=/path) and playwright-core below OUT: npm install --prefix OUT playwright-core
import { createRequire } from "node:module";
import { mkdirSync, readdirSync, statSync } from "node:fs";
import { basename, dirname, join, relative, resolve } from "node:path";

const [out, ...rest] = process.argv.slice(2);
const only = rest.includes("--only") ? new RegExp(rest.splice(rest.indexOf("--only"), 2)[1]) : /./;
const pictures = !rest.includes("--no-pictures");
const { chromium } = createRequire(resolve(out, "package.json"))("playwright-core");
const TALLEST = 5000; // px of a picture

const files = rest.filter((word) => !word.startsWith("--")).flatMap((place) =>
  statSync(place).isDirectory()
    ? readdirSync(place, { recursive: true }).filter((f) => f.endsWith(".html")).map((f) => [place, join(place, f)])
    : [[dirname(place), place]],
).filter(([, file]) => only.test(file));

function examine() {
  const found = [];
  const root = document.documentElement;
  if (root.scrollWidth > root.clientWidth) {
    const wide = [...document.body.querySelectorAll("*")].filter((e) => e.getBoundingClientRect().right > root.clientWidth + 1);
    found.push(`${root.scrollWidth} px wide: ${wide.slice(0, 3).map((e) => `${e.tagName}.${e.className}`).join(", ")}`);
  }
  for (const image of document.images) {
    if (!image.alt.trim()) found.push(`no alternative text: ${image.getAttribute("src")}`);
    if (image.complete && !image.naturalWidth) found.push(`does not load: ${image.getAttribute("src")}`);
  }
  for (const picture of document.querySelectorAll("main svg[role=img], figure svg"))
    if (!picture.getAttribute("aria-label") && !picture.querySelector("title")) found.push("drawing without a title");
  const canvas = Object.assign(document.createElement("canvas"), { width: 1, height: 1 }).getContext("2d", { willReadFrequently: true });
  const channels = (colour) => {
    canvas.clearRect(0, 0, 1, 1);
    canvas.fillStyle = colour;
    canvas.fillRect(0, 0, 1, 1);
    const [r, g, b, a] = canvas.getImageData(0, 0, 1, 1).data;
    return [r, g, b, a / 255];
  };
  const over = (top, below) => below.map((c, i) => (i < 3 ? top[i] * top[3] + c * (1 - top[3]) : 1));
  const light = (rgb) => {
    const [r, g, b] = rgb.map((c) => (c / 255 <= 0.04045 ? c / 255 / 12.92 : ((c / 255 + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const worst = new Map();
  for (const element of document.body.querySelectorAll("*")) {
    const text = [...element.childNodes].filter((n) => n.nodeType === 3).map((n) => n.data.trim()).join("");
    const box = element.getBoundingClientRect();
    const style = getComputedStyle(element);
    if (!text || !box.width || !box.height || style.visibility === "hidden" || element.closest("svg, [hidden], [aria-hidden=true], .md-search, .headerlink")) continue;
    if (box.right <= 0 || box.left >= root.clientWidth + 2000) continue;
    let opacity = 1;
    const above = [];
    for (let e = element; e; e = e.parentElement) {
      above.push(channels(getComputedStyle(e).backgroundColor));
      opacity *= +getComputedStyle(e).opacity;
    }
    if (opacity < 0.1) continue;
    const ground = above.reverse().reduce((below, top) => over(top, below), [255, 255, 255, 1]);
    const ink = channels(style.color);
    ink[3] *= opacity;
    const [a, b] = [light(over(ink, ground).slice(0, 3)), light(ground.slice(0, 3))].sort((x, y) => y - x);
    const ratio = (a + 0.05) / (b + 0.05);
    const size = parseFloat(style.fontSize);
    const large = size >= 24 || (size >= 18.66 && +style.fontWeight >= 700);
    if (ratio < (large ? 3 : 4.5)) worst.set(`${element.tagName.toLowerCase()}.${element.className}`.slice(0, 60), `${ratio.toFixed(2)} '${text.slice(0, 24)}'`);
  }
  for (const [where, what] of worst) found.push(`contrast ${what} of ${where}`);
  return found;
}

const browser = await chromium.launch({
  executablePath: process.env.CHROMIUM ?? "/usr/bin/chromium",
  args: ["--no-sandbox", "--disable-gpu", "--disable-quic", "--disable-background-networking", "--allow-file-access-from-files"],
});
const report = new Map();
for (const width of [390, 1200])
  for (const colorScheme of ["light", "dark"]) {
    const context = await browser.newContext({ viewport: { width, height: 900 }, colorScheme });
    const page = await context.newPage();
    const note = (file, what) => report.set(`${file}: ${what}`, [...(report.get(`${file}: ${what}`) ?? []), `${width} ${colorScheme}`]);
    let now = "";
    page.on("pageerror", (error) => note(now, `script: ${error.message}`));
    page.on("request", (request) => {
      if (!/^(file|data|blob|about):/.test(request.url())) note(now, `fetches ${request.url()}`);
    });
    for (const [place, file] of files) {
      now = relative(place, file) || basename(file);
      await page.goto(`file://${resolve(file)}`);
      await page.waitForTimeout(60);
      for (const what of await page.evaluate(examine)) note(now, what);
      if (!pictures) continue;
      const target = join(out, `${width}-${colorScheme}`, now.replace(/\.html$/, ".png"));
      mkdirSync(dirname(target), { recursive: true });
      const height = Math.min(TALLEST, await page.evaluate(() => document.documentElement.scrollHeight));
      await page.screenshot({ path: target, fullPage: true, clip: { x: 0, y: 0, width, height } });
    }
    await context.close();
  }
await browser.close();
for (const [what, where] of [...report].sort()) console.log(`${what} (${where.join(", ")})`);
console.log(`${files.length} pages, ${report.size} findings`);
process.exit(report.size ? 1 : 0);
