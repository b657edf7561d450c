//! The charts of the report, drawn as SVG for a width in pixels: lines, bars with intervals, rows of bars, and a timeline.
//!
//! A mark of style `n` has the page's class `s{n}`. Values that are not finite are left out.

use crate::svg::{
    Frame, STYLES, at, dashes, document, escape, is_drawable, legend_rows, line_sample, marker, nice_step, range, short,
    shortened, square, text_width, tick_text,
};

/// One line of a chart.
pub(crate) struct Series {
    pub(crate) name: String,
    /// Which colour, marker and dash it gets.
    pub(crate) style: usize,
    /// (x, y), x ascending.
    pub(crate) points: Vec<(f64, f64)>,
}

/// Lines over a numeric axis.
pub(crate) struct LineChart {
    /// What is seen, for readers of screens.
    pub(crate) label: String,
    pub(crate) x_label: String,
    pub(crate) y_label: String,
    pub(crate) series: Vec<Series>,
    /// y is a share of 1, drawn from 0 to 100 %.
    pub(crate) percent: bool,
}

/// One upright bar with the interval of its value.
pub(crate) struct Bar {
    pub(crate) position: usize,
    pub(crate) value: f64,
    pub(crate) interval: Option<(f64, f64)>,
    pub(crate) highlighted: bool,
    pub(crate) hover: String,
}

/// Upright bars at whole-numbered positions.
pub(crate) struct BarChart {
    pub(crate) label: String,
    pub(crate) x_label: String,
    pub(crate) y_label: String,
    pub(crate) plain_name: String,
    pub(crate) highlighted_name: String,
    pub(crate) bars: Vec<Bar>,
}

/// One bar that lies, with the text at its end.
pub(crate) struct RowBar {
    pub(crate) style: usize,
    pub(crate) length: f64,
    pub(crate) text: String,
}

/// Bars that lie, in named groups; `names` are those of the styles.
pub(crate) struct RowChart {
    pub(crate) label: String,
    pub(crate) names: Vec<String>,
    pub(crate) groups: Vec<(String, Vec<RowBar>)>,
}

/// One box of the timeline.
pub(crate) struct Span {
    pub(crate) lane: usize,
    pub(crate) start: f64,
    pub(crate) end: f64,
    pub(crate) style: usize,
    /// Drawn as an outline only.
    pub(crate) hollow: bool,
    pub(crate) text: String,
    pub(crate) hover: String,
}

/// Boxes on named lanes over time in seconds.
pub(crate) struct Timeline {
    pub(crate) label: String,
    pub(crate) lanes: Vec<String>,
    pub(crate) legend: Vec<(usize, String)>,
    pub(crate) spans: Vec<Span>,
}

/// Draws lines with axes and a legend.
pub(crate) fn line_chart(chart: &LineChart, width: f64) -> String {
    let series: Vec<(&Series, Vec<(f64, f64)>)> = chart.series.iter().map(|series| (series, drawable(&series.points))).collect();
    let all = || series.iter().flat_map(|(_, points)| points.iter().copied());
    let (x_low, x_high) = range(all().map(|point| point.0));
    let (y_low, y_high) = if chart.percent { (0.0, 1.0) } else { range(all().map(|point| point.1)) };
    let legend: Vec<(usize, String)> = chart.series.iter().map(|series| (series.style, series.name.clone())).collect();
    let (mut body, top) = legend_rows(&legend, width, line_sample);

    let plot_height = (width * 0.42).clamp(170.0, 270.0);
    let y_step = nice_step(y_high - y_low, plot_height / 42.0);
    let y = ((y_low / y_step).floor() * y_step, (y_high / y_step - 1e-9).ceil() * y_step);
    let frame = Frame::new(width, top, plot_height, (x_low, x_high), y, y_step, chart.percent);
    body += &frame.y_axis(&chart.y_label);
    let x_step = nice_step(x_high - x_low, (frame.right - frame.left) / 64.0).max(1.0);
    let first = (x_low / x_step - 1e-9).ceil() as i64;
    let last = (x_high / x_step + 1e-9).floor() as i64;
    let ticks: Vec<(f64, String)> =
        (first..=last).map(|tick| (tick as f64 * x_step, tick_text(tick as f64 * x_step, x_step, false))).collect();
    body += &frame.x_axis(&ticks, &chart.x_label);

    for (series, points) in &series {
        let places: Vec<(f64, f64)> = points.iter().map(|point| (frame.x(point.0), frame.y(point.1))).collect();
        let path: Vec<String> = places.iter().map(|(x, y)| format!("{},{}", at(*x), at(*y))).collect();
        let style = series.style % STYLES;
        if path.len() > 1 {
            let dash = dashes(series.style);
            body += &format!(r#"<polyline class="line s{style}"{dash} points="{}"/>"#, path.join(" "));
        }
        // Beyond this many points, markers would hide the line they mark.
        if points.len() <= 40 {
            for ((x, y), value) in places.iter().zip(points) {
                let value_text = if chart.percent { format!("{:.1} %", value.1 * 100.0) } else { short(value.1) };
                let hover = format!("{}, {} {}: {value_text}", series.name, chart.x_label, short(value.0));
                body += &format!("<g><title>{}</title>{}</g>", escape(&hover), marker(series.style, *x, *y));
            }
        }
    }
    document(&chart.label, width, frame.bottom + 46.0, &body)
}

/// Draws upright bars with whiskers; the highlighted one stands on a coloured column.
pub(crate) fn bar_chart(chart: &BarChart, width: f64) -> String {
    let bars: Vec<&Bar> = chart.bars.iter().filter(|bar| is_drawable(bar.value)).collect();
    let intervals = || bars.iter().filter_map(|bar| bar.interval).flat_map(|(low, high)| [low, high]);
    let reach = bars.iter().map(|bar| bar.value).chain(intervals()).filter(|value| is_drawable(*value));
    let (low, high) = range(reach.chain([0.0]));
    let last = bars.iter().map(|bar| bar.position).max().unwrap_or(0);
    let legend = [(0, chart.plain_name.clone()), (1, chart.highlighted_name.clone())];
    let shown = if bars.iter().any(|bar| bar.highlighted) { &legend[..] } else { &legend[..1] };
    let (mut body, top) = legend_rows(shown, width, |style, x, y| square(x, y, &format!("fill s{style}")));

    let plot_height = (width * 0.38).clamp(170.0, 250.0);
    let y_step = nice_step(high - low, plot_height / 42.0);
    let y = ((low / y_step + 1e-9).floor() * y_step, (high / y_step - 1e-9).ceil() * y_step);
    let frame = Frame::new(width, top, plot_height, (-0.6, last as f64 + 0.6), y, y_step, false);
    body += &frame.y_axis(&chart.y_label);
    let slot = (frame.right - frame.left) / (last as f64 + 1.2);
    let every = nice_step(last as f64 + 1.0, (frame.right - frame.left) / 24.0).max(1.0) as usize;
    let ticks: Vec<(f64, String)> = (0..=last).step_by(every).map(|tick| (tick as f64, tick.to_string())).collect();
    body += &frame.x_axis(&ticks, &chart.x_label);

    let thickness = (slot * 0.66).min(36.0);
    for bar in &bars {
        let (x, from, to) = (frame.x(bar.position as f64), frame.y(0.0), frame.y(bar.value));
        let style = usize::from(bar.highlighted);
        if bar.highlighted {
            // The least harmful layer has the smallest bar, easily overlooked without a column behind it.
            let (left, top, height) = (at(x - slot / 2.0), at(frame.top), at(frame.bottom - frame.top));
            body += &format!(r#"<rect class="column s1" x="{left}" y="{top}" width="{}" height="{height}"/>"#, at(slot));
        }
        body += &format!(
            r#"<g><title>{}</title><rect class="fill s{style}" x="{}" y="{}" width="{}" height="{}"/>"#,
            escape(&bar.hover),
            at(x - thickness / 2.0),
            at(from.min(to)),
            at(thickness),
            at((from - to).abs().max(0.5)),
        );
        if let Some((low, high)) = bar.interval.filter(|(low, high)| is_drawable(*low) && is_drawable(*high)) {
            let (low, high, cap) = (frame.y(low), frame.y(high), (thickness * 0.28).min(5.0));
            let (x, left, right) = (at(x), at(x - cap), at(x + cap));
            let (low, high) = (at(low), at(high));
            body += &format!(r#"<path class="whisker" d="M{left} {high}H{right}M{x} {high}V{low}M{left} {low}H{right}"/>"#);
        }
        body += "</g>";
    }
    let zero = at(frame.y(0.0));
    body += &format!(r#"<path class="axis" d="M{} {zero}H{}"/>"#, at(frame.left), at(frame.right));
    document(&chart.label, width, frame.bottom + 46.0, &body)
}

/// Draws lying bars in named groups.
pub(crate) fn row_chart(chart: &RowChart, width: f64) -> String {
    let legend: Vec<(usize, String)> = chart.names.iter().cloned().enumerate().collect();
    let (mut body, mut y) = legend_rows(&legend, width, |style, x, y| square(x, y, &format!("fill s{}", style % STYLES)));
    let bars = || chart.groups.iter().flat_map(|(_, bars)| bars);
    let longest = bars().map(|bar| bar.length).filter(|length| is_drawable(*length)).fold(0.0, f64::max);
    let reserved = bars().map(|bar| text_width(&bar.text)).fold(0.0, f64::max) + 12.0;
    let room = (width - reserved).max(40.0);
    for (name, bars) in &chart.groups {
        body += &format!(r#"<text class="strong" x="0" y="{}">{}</text>"#, at(y + 12.0), escape(&shortened(name, width)));
        y += 20.0;
        for RowBar { style, length, text } in bars.iter().filter(|bar| is_drawable(bar.length)) {
            let extent = if longest > 0.0 { (length / longest * room).max(1.0) } else { 1.0 };
            body += &format!(
                r#"<rect class="fill s{}" x="0" y="{}" width="{}" height="14"/><text x="{}" y="{}">{}</text>"#,
                style % STYLES,
                at(y),
                at(extent),
                at(extent + 8.0),
                at(y + 11.5),
                escape(text),
            );
            y += 18.0;
        }
        y += 12.0;
    }
    document(&chart.label, width, y, &body)
}

/// Draws boxes on lanes; time starts at the first box.
pub(crate) fn timeline(chart: &Timeline, width: f64) -> String {
    let spans: Vec<&Span> =
        chart.spans.iter().filter(|span| is_drawable(span.start) && is_drawable(span.end) && span.end > span.start).collect();
    let (low, high) = range(spans.iter().flat_map(|span| [span.start, span.end]));
    let (unit, scale) = if high - low < 2.0 { ("ms", 1000.0) } else { ("s", 1.0) };
    let length = (high - low) * scale;
    let (mut body, top) = legend_rows(&chart.legend, width, |style, x, y| square(x, y, &format!("fill s{}", style % STYLES)));
    let (lane_height, lane_gap) = (38.0, 28.0);
    let plot_height = chart.lanes.len() as f64 * (lane_height + lane_gap) + 8.0;
    let frame = Frame {
        left: 1.0,
        right: width - 16.0,
        top,
        bottom: top + plot_height,
        x: (0.0, length),
        y: (0.0, 1.0),
        y_step: 1.0,
        percent: false,
    };
    let step = nice_step(length, (frame.right - frame.left) / 64.0);
    let ticks: Vec<(f64, String)> = (0..=(length / step + 1e-9) as i64)
        .map(|tick| (tick as f64 * step, tick_text(tick as f64 * step, step, false)))
        .collect();
    for (x, _) in &ticks {
        body += &format!(r#"<path class="grid" d="M{} {}V{}"/>"#, at(frame.x(*x)), at(top), at(frame.bottom));
    }
    body += &frame.x_axis(&ticks, &format!("time, {unit}"));
    for (lane, name) in chart.lanes.iter().enumerate() {
        let y = top + lane as f64 * (lane_height + lane_gap) + 15.0;
        body += &format!(r#"<text class="strong halo" x="2" y="{}">{}</text>"#, at(y), escape(name));
    }
    for span in &spans {
        let y = top + span.lane as f64 * (lane_height + lane_gap) + lane_gap - 6.0;
        let (from, to) = (frame.x((span.start - low) * scale), frame.x((span.end - low) * scale));
        let extent = (to - from).max(1.0);
        let kind = if span.hollow { "hollow" } else { "box" };
        let style = span.style % STYLES;
        body += &format!(
            r#"<g><title>{}</title><rect class="{kind} s{style}" x="{}" y="{}" width="{}" height="{lane_height}" rx="3"/>"#,
            escape(&span.hover),
            at(from + 0.75),
            at(y),
            at((extent - 1.5).max(0.5)),
        );
        if text_width(&span.text) + 6.0 <= extent {
            let class = if span.hollow { "strong" } else { "on-fill" };
            body += &format!(
                r#"<text class="{class}" x="{}" y="{}" text-anchor="middle">{}</text>"#,
                at(from + extent / 2.0),
                at(y + lane_height / 2.0 + 4.0),
                escape(&span.text),
            );
        }
        body += "</g>";
    }
    document(&chart.label, width, frame.bottom + 46.0, &body)
}

fn drawable(points: &[(f64, f64)]) -> Vec<(f64, f64)> {
    points.iter().copied().filter(|(x, y)| is_drawable(*x) && is_drawable(*y)).collect()
}
