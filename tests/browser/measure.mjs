// What pages show in headless Chromium: node measure.mjs WIDTH FILE|URL … prints a list as JSON.
import chromium from "@sparticuz/chromium";
import puppeteer from "puppeteer-core";
import { pathToFileURL } from "node:url";

const [width, ...places] = process.argv.slice(2);
const browser = await puppeteer.launch({
  args: [...chromium.args, "--no-sandbox"],
  executablePath: await chromium.executablePath(),
  headless: "shell",
});

// Texts of charts that overlap each other, leave their chart, or are too small to read.
function faultsOfCharts() {
  const faults = [];
  for (const chart of document.querySelectorAll(".chart:not([hidden])")) {
    const border = chart.getBoundingClientRect();
    const texts = [...chart.querySelectorAll("text")]
      .map((element) => ({ element, text: element.textContent.trim(), box: element.getBoundingClientRect() }))
      .filter(({ text, box }) => text && box.width && box.height);
    texts.forEach(({ element, text, box }, index) => {
      const say = (fault) => faults.push(`${chart.id}: ${text} ${fault}`);
      if (box.left < border.left - 1 || box.right > border.right + 1) say("is cut off");
      if (box.top < border.top - 1 || box.bottom > border.bottom + 1) say("is cut off");
      if (parseFloat(getComputedStyle(element).fontSize) < 10) say("is small");
      for (const other of texts.slice(index + 1)) {
        const [a, b] = [box, other.box];
        const wide = Math.min(a.right, b.right) - Math.max(a.left, b.left);
        const high = Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top);
        if (wide > 1 && high > 3) say(`overlaps ${other.text}`); // the lines of a font have some room
      }
    });
  }
  return faults;
}

async function measure(place) {
  const address = place.startsWith("http:") ? place : pathToFileURL(place).href;
  const { origin } = new URL(address);
  const page = await browser.newPage();
  const errors = [];
  page.on("pageerror", (error) => errors.push(error.message));
  page.on("console", (message) => message.type() === "error" && errors.push(message.text()));
  page.on("request", (request) => {
    if (/^https?:/.test(request.url()) && new URL(request.url()).origin !== origin)
      errors.push(request.url());
  });
  await page.setViewport({ width: Number(width), height: 900 });
  await page.goto(address, { waitUntil: "load" });
  await page.waitForFunction(
    () => [...document.querySelectorAll(".chart:not([hidden])")].every((chart) => chart.querySelector(".main-svg")),
    { timeout: 60000 },
  );
  const shown = await page.evaluate((describeCharts) => ({
    faults: eval(describeCharts)(),
    sideways: [...document.querySelectorAll(".scroll")]
      .filter((box) => box.scrollWidth > box.clientWidth)
      .map((box) => box.querySelector("table").id),
    width: document.documentElement.scrollWidth,
    charts: Object.fromEntries(
      [...document.querySelectorAll(".chart:not([hidden])")].map((chart) => [chart.id, chart.textContent]),
    ),
    text: document.body.innerText,
  }), `(${faultsOfCharts})`);
  await page.close();
  return { ...shown, errors };
}

const measured = [];
for (const place of places) measured.push(await measure(place));
console.log(JSON.stringify(measured));
await browser.close();
