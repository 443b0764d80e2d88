// A chart over a time axis and an axis of names, whose content one function draws.
import {
  AxisPlacement,
  ScaleDirection,
  ScaleDistribution,
  ScaleOrientation,
} from "@grafana/schema";
import { UPlotConfigBuilder } from "@grafana/ui";
import uPlot from "uplot";

function addTime(builder, { range, timeZone, theme }) {
  const horizontal = { orientation: ScaleOrientation.Horizontal, direction: ScaleDirection.Right };
  const limits = [range.from.valueOf(), range.to.valueOf()];
  builder.addScale({ scaleKey: "x", isTime: true, ...horizontal, range: () => limits });
  builder.addAxis({
    scaleKey: "x",
    isTime: true,
    placement: AxisPlacement.Bottom,
    timeZone,
    theme,
    grid: { show: true },
  });
}

function addNames(builder, { theme, count, names, gap }) {
  const vertical = { orientation: ScaleOrientation.Vertical, direction: ScaleDirection.Up };
  builder.addScale({
    scaleKey: "y",
    ...vertical,
    distribution: ScaleDistribution.Ordinal,
    range: () => [0, count],
  });
  builder.addAxis({
    scaleKey: "y",
    placement: AxisPlacement.Left,
    theme,
    gap,
    splits: () => names.map(({ at }) => at),
    values: () => names.map(({ name }) => name),
    grid: { show: false },
    ticks: { show: false },
  });
}

/**
 * Return the configuration of a chart of `count` lines. `names` has the name and place of each
 * label, in lines from the bottom; `draw` draws into uPlot, and `onDraw` is told the height of a
 * line in pixels.
 */
export function nameChart({ draw, onDraw, ...chart }) {
  const builder = new UPlotConfigBuilder(chart.timeZone);
  addTime(builder, chart);
  addNames(builder, chart);
  const series = { scaleKey: "y", theme: chart.theme, show: true, lineWidth: 0, pxAlign: 0 };
  builder.addSeries({ ...series, pathBuilder: () => null, pointsBuilder: () => false });
  builder.addHook("draw", (u) => {
    const { left, top, width, height } = u.bbox;
    u.ctx.save();
    u.ctx.beginPath();
    u.ctx.rect(left, top, width, height);
    u.ctx.clip();
    draw(u);
    u.ctx.restore();
    onDraw?.(height / uPlot.pxRatio / chart.count);
  });
  return builder;
}

export function chartData(range, count) {
  return [
    [range.from.valueOf(), range.to.valueOf()],
    [0, count],
  ];
}
